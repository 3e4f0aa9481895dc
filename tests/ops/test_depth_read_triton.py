"""The Triton kernels against the definition in fp64: under Triton's interpreter, and on a GPU where there is one.

The interpreter is chosen when kernels are defined, so a process of its own runs this file as a program, which computes
every case and stores the results.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from torchtitan_ext.ops.depth_query import DepthQuery, Found, depth_read_reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
compiles = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


class Case(NamedTuple):
    """Reads of ``n`` shared sources by ``queries`` queries; with ``own`` further sources for each, in two phases."""

    n: int
    tokens: int
    width: int
    key_width: int
    dtype: torch.dtype = torch.float32
    vectors: bool = False
    """Whether each source has a query vector of its own."""
    queries: int = 1
    own: int = 0
    plain: bool = False


SMALL = {
    "one source": Case(1, 3, 20, 20, plain=True),
    "ragged": Case(5, 9, 20, 20),
    "narrow keys, vectors": Case(3, 9, 12, 5, vectors=True),
    "aligned rows": Case(4, 3, 32, 32, plain=True),
    "many sources": Case(17, 2, 12, 7),
    "bf16": Case(5, 4, 20, 20, torch.bfloat16),
    "bf16, vectors": Case(3, 5, 16, 16, torch.bfloat16, vectors=True),
    "fp16": Case(3, 3, 20, 8, torch.float16),
    "two phases": Case(3, 3, 20, 20, queries=3, own=1),
    "two phases, narrow keys, vectors": Case(2, 3, 12, 5, vectors=True, queries=2, own=2),
    "two phases, bf16": Case(3, 4, 20, 20, torch.bfloat16, queries=3, own=1),
    "first phase alone": Case(3, 3, 20, 20, queries=2),
}
LARGE = {
    "fp32": Case(9, 700, 1536, 1536),
    "bf16": Case(9, 700, 1536, 1536, torch.bfloat16),
    "bf16, narrow keys, vectors": Case(17, 300, 768, 192, torch.bfloat16, vectors=True),
    "fp16": Case(4, 300, 1000, 1000, torch.float16),
    "two phases": Case(6, 300, 1536, 1536, queries=6, own=2),
    "two phases, bf16": Case(6, 300, 1536, 1536, torch.bfloat16, queries=6, own=2),
}


def inputs(case: Case, device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Sources of very different sizes, one or n query vectors for each query, gradients of the reads."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    count = case.n + case.own * case.queries
    sources = [10.0 ** (i % 3 - 1) * draw(1, case.tokens, case.width, dtype=case.dtype) for i in range(count)]
    rows = case.n + case.own if case.vectors else 1
    vectors = [draw(rows, case.key_width, dtype=torch.float32) / case.key_width**0.5 for _ in range(case.queries)]
    grads = [draw(1, case.tokens, case.width, dtype=case.dtype) for _ in range(case.queries)]
    return [s.requires_grad_() for s in sources], [w.requires_grad_() for w in vectors], grads


Read = Callable[..., torch.Tensor]
Find = Callable[[Sequence[torch.Tensor], Sequence[DepthQuery]], list[Found]]


def reads(case: Case, sources: Sequence[torch.Tensor], vectors: Sequence[torch.Tensor], read: Read, find: Find | None):
    """All reads; in one phase each where there is no ``find``."""
    n, seen = case.n, case.n + case.own
    scales = None if case.plain else [1.0 / (1 + i % 3) for i in range(seen)]
    biases = None if case.plain else [-0.2 * i for i in range(seen)]
    queries = [DepthQuery(w.expand(seen, -1), scales, biases) for w in vectors]
    own = [list(sources[n + j * case.own : n + (j + 1) * case.own]) for j in range(case.queries)]
    shared = list(sources[:n])
    if find is None:
        return [read(shared + mine, query) for mine, query in zip(own, queries, strict=True)]
    found = find(shared, [query.of(slice(n)) for query in queries])
    if not case.own:
        return [h_BTD for h_BTD, _ in found]
    late = slice(n, None)
    return [read(mine, query.of(late), before) for mine, query, before in zip(own, queries, found, strict=True)]


def results(case: Case, device: str = "cpu") -> list[torch.Tensor]:
    """The reads, and the gradients of query vectors and sources, by the kernels."""
    from torchtitan_ext.ops.depth_read_triton import depth_read_triton, find_triton

    sources, vectors, grads = inputs(case, device)
    two_phases = case.own > 0 or case.queries > 1
    read = reads(case, sources, vectors, depth_read_triton, find_triton if two_phases else None)
    return [*read, *torch.autograd.grad(read, [*vectors, *sources], grads)]


def check(case: Case, got: Sequence[torch.Tensor], rounding: dict[torch.dtype, float]) -> None:
    """Sums are in fp32, so an output is off by the last rounding and a few of fp32's, relative to the largest. The
    gradients of two phases are made from ⟨g, h⟩ with the read as it was given out, which was rounded before."""
    leaves = inputs(case)
    sources, vectors, grads = ([t.detach().double().requires_grad_() for t in tensors] for tensors in leaves)
    read = reads(case, sources, vectors, depth_read_reference, None)
    exact = [*read, *torch.autograd.grad(read, [*vectors, *sources], grads)]
    for i, (result, wanted, leaf) in enumerate(zip(got, exact, [*leaves[2], *leaves[1], *leaves[0]], strict=True)):
        assert result.dtype == leaf.dtype
        from_rounded = rounding[case.dtype] if case.own and i >= case.queries else 0.0
        bound = rounding[result.dtype] * wanted.abs() + (100 * 2.0**-24 + from_rounded) * wanted.abs().max() + 1e-7
        assert ((result.cpu().double() - wanted).abs() <= bound).all()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    out = tmp_path_factory.mktemp("interpreted") / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(out)], check=True, env=environment, cwd=Path(__file__).parents[2])
    return torch.load(out)


@compiles
@pytest.mark.parametrize("name", SMALL)
def test_the_interpreted_kernels_are_the_definition(name, interpreted) -> None:
    # A GPU rounds to the nearest bf16 number; the interpreter cuts off, which is twice as far.
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
    check(SMALL[name], interpreted[name], rounding)


@needs_gpu
@pytest.mark.parametrize("case", [*SMALL.values(), *LARGE.values()], ids=[*SMALL, *(f"large {name}" for name in LARGE)])
def test_the_kernels_on_a_gpu_are_the_definition(case) -> None:
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    check(case, results(case, "cuda"), rounding)


@needs_gpu
def test_a_gpu_gives_the_same_bits_again() -> None:
    first, second = results(LARGE["bf16"], "cuda"), results(LARGE["bf16"], "cuda")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@compiles
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_kernels_compile_for_a_gpu_and_move_whole_pieces(kernel, tmp_path, monkeypatch) -> None:
    """For an H100, with no GPU at hand. A row that is not known to be aligned would be read 2 bytes at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchtitan_ext.ops import depth_read_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"G": 2, "D": 192, "K": 192, "ONE_W": True, "PHASE": kernels.FIRST.value, "ALONE": True}
    constants |= {"QUERIES": 2, "WIDTH": 256, "STAGES": 3, "element": triton.language.bfloat16}
    constants["read_element"] = triton.language.float32
    function = getattr(kernels, kernel)
    types = {name: "constexpr" if name in constants else "*fp32" for name in function.arg_names}
    types |= {name: "i32" for name in ("n", "tokens", "run")} | {"addresses": "*i64"}
    if kernel == "forward":
        types["eps"] = "fp32"
    constants = {name: value for name, value in constants.items() if name in types}
    source = ASTSource(function, types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert compiled.asm["cubin"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert "global.b16" not in compiled.asm["ptx"]


if __name__ == "__main__":
    from torchtitan_ext.ops import depth_read_triton

    depth_read_triton.ENOUGH_PROGRAMS = 2  # so that a program has several tokens, and the last one fewer
    torch.save({name: results(case) for name, case in SMALL.items()}, sys.argv[1])
