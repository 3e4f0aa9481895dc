"""Which backends a read may use, and that all of them read alike (on a GPU, where they are installed)."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torchtitan_ext.ops import backends
from torchtitan_ext.ops.backends import AUTO, BACKENDS, Ask, able, asks, check_able, find, read, unavailable
from torchtitan_ext.ops.depth_query import DepthQuery, depth_read_reference
from torchtitan_ext.ops.depth_read import depth_read
from torchtitan_ext.ops.depth_read import find as find_by_torch

D = 64
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PEERS = [name for name in BACKENDS if name not in ("torch", "triton")]


def query(n: int, width: int = D, *, one: bool = True, **more) -> DepthQuery:
    w = torch.randn(1 if one else n, width, generator=torch.Generator().manual_seed(n))
    return DepthQuery(w.expand(n, -1), **more)


def sources(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu", width: int = D) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(2, 9, width, generator=generator) for _ in range(n)]
    return [tensor.to(device, dtype).requires_grad_() for tensor in drawn]


LOW_RANK = {"basis_nRK": torch.randn(3, 2, D), "coefficients_BTR": torch.randn(2, 9, 2)}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (query(3), set()),
        (query(3, scales=[1.0, 1, 1], biases=[0.0, 0, 0]), set()),
        (query(3, scales=[1.0, 0.5, 1]), {Ask.SCALES}),
        (query(3, biases=[0.0, -1, -2]), {Ask.BIASES}),
        (query(3, one=False), {Ask.VECTORS}),
        (query(1, one=False), set()),
        (query(3, 16), {Ask.NARROW_KEYS}),
        (query(3, **LOW_RANK), {Ask.TOKEN_DEPENDENT}),
    ],
)
def test_what_a_read_asks_for(given, asked) -> None:
    assert asks(given, D) == asked
    assert asks(query(3, 96), 96) == {Ask.ODD_WIDTH}


def test_who_is_able() -> None:
    assert able(set(), torch.bfloat16) == list(BACKENDS)
    assert able(set(), torch.float64) == ["torch"]
    assert able(set(), torch.float32) == ["torch", "triton", "flash-linear-attention"]
    assert able({Ask.TOKEN_DEPENDENT}, torch.bfloat16) == ["torch"]
    for ask in (Ask.SCALES, Ask.BIASES, Ask.VECTORS, Ask.PHASES):
        assert able({ask}, torch.bfloat16) == ["torch", "triton"]
    assert able({Ask.NARROW_KEYS}, torch.bfloat16) == ["torch", "triton", "fast-attnres"]
    assert "flash-attn-res" not in able({Ask.ODD_WIDTH}, torch.bfloat16)


def test_a_backend_that_cannot_do_it_is_refused_with_those_that_can() -> None:
    check_able("fast-attnres", {Ask.NARROW_KEYS}, torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"'fast-attnres' has no read of .*float32.*; choose from: auto, torch, triton"
    ):
        check_able("fast-attnres", set(), torch.float32)
    with pytest.raises(ValueError, match=r"'triton' has no read of .*depend on the token; choose from: auto, torch$"):
        check_able("triton", {Ask.TOKEN_DEPENDENT}, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", [AUTO, *BACKENDS])
def test_without_a_gpu_every_read_is_torch_s(name) -> None:
    assert (unavailable(name) is None) == (name in (AUTO, "torch"))
    given = sources(3)
    assert torch.equal(read(given, query(3), backend=name), depth_read(given, query(3)))
    (h_BTD, lse_BT), (wanted_h, wanted_lse) = find(given, [query(3)], name)[0], find_by_torch(given, [query(3)])[0]
    assert torch.equal(h_BTD, wanted_h)
    assert torch.equal(lse_BT, wanted_lse)


def test_a_package_that_is_missing_is_named(monkeypatch) -> None:
    """On a machine with a GPU but without any of the packages."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(BACKENDS, "fast-attnres", replace(BACKENDS["fast-attnres"], module="not_installed"))
    unavailable.cache_clear()
    reason = unavailable("fast-attnres")
    unavailable.cache_clear()
    assert reason is not None
    assert "pip install 'fast-attnres" in reason


def reference(given: list[torch.Tensor], w_K: torch.Tensor, grad_BTD: torch.Tensor) -> list[torch.Tensor]:
    exact, w = [source.detach().double().requires_grad_() for source in given], w_K.double().requires_grad_()
    h_BTD = depth_read_reference(exact, DepthQuery(w.expand(len(given), -1)))
    return [h_BTD, *torch.autograd.grad(h_BTD, [w, *exact], grad_BTD.double())]


@needs_gpu
@pytest.mark.parametrize("name", PEERS)
def test_the_field_s_own_kernels_read_alike(name) -> None:
    """In bf16, with a query that bf16 holds exactly; they store intermediate results in bf16 too."""
    if reason := unavailable(name):
        pytest.skip(f"{name} {reason}")
    given = sources(5, torch.bfloat16, "cuda", width=256)
    w_K = (torch.randn(256, generator=torch.Generator().manual_seed(5)) / 16).bfloat16().float().cuda()
    grad_BTD = torch.randn(2, 9, 256, generator=torch.Generator().manual_seed(6)).bfloat16().cuda()
    w = w_K.clone().requires_grad_()
    h_BTD = read(given, DepthQuery(w.expand(5, -1)), backend=name)
    assert h_BTD.dtype == torch.bfloat16
    got = [h_BTD, *torch.autograd.grad(h_BTD, [w, *given], grad_BTD)]
    for result, wanted in zip(got, reference(given, w_K, grad_BTD), strict=True):
        assert (result.double() - wanted).abs().max() <= 2.0**-7 * wanted.abs().max()


@needs_gpu
def test_auto_measures_once_for_a_kind_of_read_and_disturbs_nothing(monkeypatch) -> None:
    measured = []
    monkeypatch.setattr(backends, "_fastest", {})
    honest = backends._measured
    monkeypatch.setattr(backends, "_measured", lambda *given: measured.append(given) or honest(*given))
    given, w = sources(4, torch.bfloat16, "cuda"), query(4).w_nK.cuda()
    (plain,) = torch.autograd.grad(read(given, DepthQuery(w)).sum(), given[0])
    again = checkpoint(lambda *tensors: read(tensors, DepthQuery(w)), *given, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), given[0])[0], plain)
    assert len(measured) == 1
    with torch.no_grad():
        read(given, DepthQuery(w))
    assert len(measured) == 2
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    read(given[:3], DepthQuery(w[:3]))
    assert len(measured) == 2
