"""The fused depth read against loops over tokens, against the plain reference, against finite differences."""

import math

import pytest
import torch

from torchtitan_ext.ops import depth_read as module
from torchtitan_ext.ops.depth_query import DepthQuery, Found, depth_read_reference, depth_weights
from torchtitan_ext.ops.depth_read import depth_read, find, take

B, D = 2, 12


def draw(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    values = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def inputs(
    n: int, tokens: int, dtype: torch.dtype, *, key_width: int = D, rank: int = 0, plain: bool = False
) -> tuple[list[torch.Tensor], DepthQuery]:
    """Sources of very different sizes, and a query with every part that is asked for."""
    small = torch.float64 if dtype == torch.float64 else torch.float32
    sources = [draw(B, tokens, D, dtype=dtype, seed=i, scale=10.0 ** (i % 3 - 1)) for i in range(n)]
    query = DepthQuery(
        draw(n, key_width, dtype=small, seed=100),
        scales=None if plain else [1.0 / (1 + i % 3) for i in range(n)],
        biases=None if plain else [-0.2 * i for i in range(n)],
        basis_nRK=draw(n, rank, key_width, dtype=small, seed=101) if rank else None,
        coefficients_BTR=draw(B, tokens, rank, dtype=dtype, seed=102) if rank else None,
    )
    return sources, query


def leaves(sources: list[torch.Tensor], query: DepthQuery) -> list[torch.Tensor]:
    return [t for t in (query.w_nK, query.basis_nRK, query.coefficients_BTR, *sources) if t is not None]


def as_double(sources: list[torch.Tensor], query: DepthQuery) -> tuple[list[torch.Tensor], DepthQuery]:
    def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().double().requires_grad_()

    w_nK = query.w_nK.detach().double().requires_grad_()
    exact = DepthQuery(w_nK, query.scales, query.biases, double(query.basis_nRK), double(query.coefficients_BTR))
    return [source.detach().double().requires_grad_() for source in sources], exact


def loops(sources: list[torch.Tensor], query: DepthQuery) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, token by token and source by source, in Python floats: the read and its weights [B, T, n]."""
    n, key_width = query.w_nK.shape
    h_BTD = torch.zeros_like(sources[0], dtype=torch.float64)
    alpha_BTn = torch.zeros(*h_BTD.shape[:2], n, dtype=torch.float64)
    for b in range(h_BTD.shape[0]):
        for t in range(h_BTD.shape[1]):
            logits, values = [], []
            for i in range(n):
                value = [(query.scales[i] if query.scales else 1.0) * x for x in sources[i][b, t].tolist()]
                key = value[len(value) - key_width :]
                w = query.w_nK[i].tolist()
                if query.basis_nRK is not None:
                    for c, u in zip(query.coefficients_BTR[b, t].tolist(), query.basis_nRK[i].tolist(), strict=True):
                        w = [x + c * y for x, y in zip(w, u, strict=True)]
                rms = math.sqrt(sum(x * x for x in key) / key_width + query.eps)
                logit = sum(x * y for x, y in zip(w, key, strict=True)) / rms
                logits.append(logit + (query.biases[i] if query.biases else 0.0))
                values.append(value)
            weights = [math.exp(logit - max(logits)) for logit in logits]
            weights = [weight / sum(weights) for weight in weights]
            alpha_BTn[b, t] = torch.tensor(weights, dtype=torch.float64)
            h_BTD[b, t] = sum(w * torch.tensor(v, dtype=torch.float64) for w, v in zip(weights, values, strict=True))
    return h_BTD, alpha_BTn


OPTIONS = {
    "static": {},
    "no scales or biases": {"plain": True},
    "narrow keys": {"key_width": 5},
    "token-dependent": {"rank": 3},
    "narrow keys, token-dependent": {"key_width": 5, "rank": 3},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_option
@pytest.mark.parametrize("read", [depth_read, depth_read_reference])
def test_both_reads_are_the_formula(options, read) -> None:
    sources, query = inputs(4, 5, torch.float64, **options)
    expected, weights = loops(sources, query)
    torch.testing.assert_close(read(sources, query), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(depth_weights(sources, query), weights, rtol=1e-12, atol=1e-12)


@every_option
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_output_and_gradients_are_the_reference_s(options, n, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(module, "_CPU_CHUNK_ELEMENTS", 7 * D)  # 2 x 19 tokens: five chunks of 7 and one of 3
    sources, query = inputs(n, 19, torch.float64, **options)
    weight_BTD = draw(B, 19, D, dtype=torch.float64, seed=200).detach()
    h, expected = depth_read(sources, query), depth_read_reference(sources, query)
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(h, leaves(sources, query), weight_BTD)
    wanted = torch.autograd.grad(expected, leaves(sources, query), weight_BTD)
    for gradient, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-10)


@every_option
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_low_precision_is_one_rounding_away_from_exact(options, dtype, precision) -> None:
    """Against fp64 on the same inputs. All arithmetic is in fp32, so a bf16 result is rounded once, at the end."""
    sources, query = inputs(9, 33, dtype, **options)
    exact_sources, exact_query = as_double(sources, query)
    weight_BTD = draw(B, 33, D, dtype=dtype, seed=200).detach()
    h, exact = depth_read(sources, query), depth_read_reference(exact_sources, exact_query)
    assert h.dtype == dtype
    results = [h, *torch.autograd.grad(h, leaves(sources, query), weight_BTD)]
    exacts = [exact, *torch.autograd.grad(exact, leaves(exact_sources, exact_query), weight_BTD.double())]
    for result, reference, leaf in zip(results, exacts, [h, *leaves(sources, query)], strict=True):
        assert result.dtype == leaf.dtype
        rounding = precision if result.dtype == dtype else 2.0**-24
        bound = rounding * reference.abs() + 64 * 2.0**-24 * reference.abs().max()
        assert ((result.double() - reference).abs() <= bound).all()


@every_option
def test_derivative_is_the_slope(options) -> None:
    sources, query = inputs(3, 2, torch.float64, **options)
    given = leaves(sources, query)

    def read(*tensors: torch.Tensor) -> torch.Tensor:
        rest = iter(tensors)
        w_nK = next(rest)
        basis, coefficients = (next(rest), next(rest)) if query.basis_nRK is not None else (None, None)
        return depth_read(list(rest), DepthQuery(w_nK, query.scales, query.biases, basis, coefficients))

    assert torch.autograd.gradcheck(read, given)


def test_weights_sum_to_one_and_shift_with_the_logits() -> None:
    sources, query = inputs(7, 9, torch.float64)
    weights = depth_weights(sources, query)
    assert not weights.requires_grad
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 9, dtype=torch.float64), rtol=0, atol=1e-14)
    shifted = DepthQuery(query.w_nK, query.scales, [bias + 3.0 for bias in query.biases])
    torch.testing.assert_close(depth_weights(sources, shifted), weights, rtol=1e-12, atol=0)


def test_equal_sources_are_returned_whatever_the_query() -> None:
    source = draw(B, 9, D, dtype=torch.float64, seed=0)
    h = depth_read([source] * 5, DepthQuery(draw(5, D, dtype=torch.float64, seed=1)))
    torch.testing.assert_close(h, source, rtol=1e-14, atol=1e-14)


def test_a_source_used_twice_gets_both_gradients() -> None:
    sources, query = inputs(2, 9, torch.float64, plain=True)
    query = DepthQuery(draw(3, D, dtype=torch.float64, seed=5))
    twice = [sources[0], sources[1], sources[0]]
    (gradient,) = torch.autograd.grad(depth_read(twice, query).square().sum(), sources[0])
    (reference,) = torch.autograd.grad(depth_read_reference(twice, query).square().sum(), sources[0])
    torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11)


def test_strided_sources_and_gradients() -> None:
    sources, query = inputs(3, 8, torch.float64)
    turned = [source.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for source in sources]
    assert not turned[0].is_contiguous()
    torch.testing.assert_close(depth_read(turned, query), depth_read(sources, query), rtol=0, atol=0)
    gradients = torch.autograd.grad(depth_read(turned, query).sum(), turned)  # sum: a gradient of stride 0
    references = torch.autograd.grad(depth_read_reference(sources, query).sum(), sources)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_inputs_give_finite_gradients(dtype) -> None:
    sources, _ = inputs(4, 6, dtype)
    with torch.no_grad():
        sources[0].zero_()
        sources[1].mul_(1e-20)
        sources[2].mul_(1e4)
    query = DepthQuery(draw(4, D, dtype=torch.float32, seed=3, scale=1e3))
    h = depth_read(sources, query)
    gradients = torch.autograd.grad(h.float().square().mean(), leaves(sources, query))
    assert all(tensor.isfinite().all() for tensor in (h, *gradients))


@every_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_references_and_per_token_scalars_only(options, dtype) -> None:
    n, tokens = 6, 40
    sources, query = inputs(n, tokens, dtype, **options)
    given = {tensor.untyped_storage().data_ptr() for tensor in leaves(sources, query)}
    extra = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal extra
        if tensor.untyped_storage().data_ptr() not in given:
            extra += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        depth_read(sources, query)
    assert 0 < extra <= (2 * n + 1) * B * tokens * 4  # fp32: logit and inverse RMS of each source, log-sum-exp


def test_inside_a_compiled_graph() -> None:
    sources, query = inputs(3, 4, torch.float64, rank=2)
    h = torch.compile(depth_read, backend="aot_eager", fullgraph=True)(sources, query)
    torch.testing.assert_close(h, depth_read(sources, query), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(h.sum(), leaves(sources, query))
    references = torch.autograd.grad(depth_read(sources, query).sum(), leaves(sources, query))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11)


def several(reads: int, shared: int, own: int, dtype: torch.dtype, key_width: int = D) -> tuple:
    """Sources, those of one read alone per read, and a query per read over the first and then its own."""
    small = torch.float64 if dtype == torch.float64 else torch.float32
    sources = [draw(B, 19, D, dtype=dtype, seed=i, scale=10.0 ** (i % 3 - 1)) for i in range(shared)]
    alone = [[draw(B, 19, D, dtype=dtype, seed=50 + 10 * g + i) for i in range(own)] for g in range(reads)]
    scales = [1.0 / (1 + i % 3) for i in range(shared + own)]
    queries = [
        DepthQuery(
            draw(shared + own, key_width, dtype=small, seed=100 + g),
            scales=scales,
            biases=[-0.2 * i * g for i in range(shared + own)],
        )
        for g in range(reads)
    ]
    return sources, alone, queries


def two_phases(sources, alone, queries, *, find=find, read=depth_read) -> list[torch.Tensor]:
    """What each read finds in the shared sources, and then in its own; a read without any is what was found."""
    shared = len(sources)
    found = find(sources, [query.of(slice(shared)) for query in queries])
    return [
        read(own, query.of(slice(shared, None)), before) if own else take(before, before.h_BTD.dtype)
        for own, query, before in zip(alone, queries, found, strict=True)
    ]


def one_by_one(sources, alone, queries) -> list[torch.Tensor]:
    return [depth_read_reference([*sources, *own], query) for own, query in zip(alone, queries, strict=True)]


@pytest.mark.parametrize("key_width", [D, 5])
@pytest.mark.parametrize(("reads", "shared", "own"), [(1, 2, 1), (3, 4, 1), (4, 2, 3), (2, 5, 0)])
def test_two_phases_are_one_read(reads, shared, own, key_width, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(module, "_CPU_CHUNK_ELEMENTS", 60 * D)  # chunks of a few tokens, the last one shorter
    given = several(reads, shared, own, torch.float64, key_width)
    sources, alone, queries = given
    inputs = [*(query.w_nK for query in queries), *sources, *(source for row in alone for source in row)]
    results, expected = two_phases(*given), one_by_one(*given)
    weights = [draw(B, 19, D, dtype=torch.float64, seed=200 + g).detach() for g in range(reads)]
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(results, inputs, weights)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-10)


class Wrapped(torch.autograd.Function):
    """Hands tensors on, and fills in gradients that are missing with zeros, as FSDP's hooks do."""

    @staticmethod
    def forward(ctx, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


@pytest.mark.parametrize("own", [0, 1])
def test_two_phases_across_a_wrapper_that_fills_in_missing_gradients(own) -> None:
    sources, alone, queries = several(3, 3, own, torch.float64)
    inputs = [*(query.w_nK for query in queries), *sources]

    def find_wrapped(sources, queries) -> list[Found]:
        flat = Wrapped.apply(*(tensor for found in find(sources, queries) for tensor in found))
        return [Found(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]

    # The third read is never made.
    results = two_phases(sources, alone, queries, find=find_wrapped)[:2]
    expected = one_by_one(sources, alone, queries)[:2]
    gradients = torch.autograd.grad([result.square().sum() for result in results], inputs, allow_unused=True)
    references = torch.autograd.grad([result.square().sum() for result in expected], inputs, allow_unused=True)
    for gradient, reference in zip(gradients, references, strict=True):
        reference = torch.zeros_like(gradient) if reference is None else reference
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-10)


def test_a_finding_that_no_read_takes_costs_no_gradient() -> None:
    sources, alone, queries = several(3, 2, 1, torch.float64)
    inputs = [*(query.w_nK for query in queries), *sources]
    results, expected = (reads(sources, alone, queries)[1] for reads in (two_phases, one_by_one))
    gradients = torch.autograd.grad(results.square().sum(), inputs, allow_unused=True)
    references = torch.autograd.grad(expected.square().sum(), inputs, allow_unused=True)
    assert [gradient is None for gradient in gradients[:3]] == [True, False, True]
    for gradient, reference in zip(gradients, references, strict=True):
        if reference is not None:
            torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_two_phases_round_twice(dtype, precision) -> None:
    """Against fp64: once what is handed from phase to phase, once the result."""
    given = several(3, 6, 2, dtype)
    exact = tuple(
        [source.detach().double().requires_grad_() for source in group]
        for group in (given[0], *given[1], [query.w_nK for query in given[2]])
    )
    sources, *alone, vectors = exact
    queries = [DepthQuery(w, query.scales, query.biases) for w, query in zip(vectors, given[2], strict=True)]
    results, expected = two_phases(*given), one_by_one(sources, alone, queries)
    weights = [draw(B, 19, D, dtype=dtype, seed=200 + g).detach() for g in range(3)]
    gradients = torch.autograd.grad(results, given[0], weights)
    exact_gradients = torch.autograd.grad(expected, sources, [weight.double() for weight in weights])
    for result, reference in zip([*results, *gradients], [*expected, *exact_gradients], strict=True):
        assert result.dtype == dtype
        assert (result.double() - reference).norm() <= (2 * precision + 64 * 2.0**-24) * reference.norm()


def test_the_slope_of_two_phases() -> None:
    sources, alone, queries = several(2, 3, 1, torch.float64, key_width=7)
    inputs = [*(query.w_nK for query in queries), *sources, *(source for row in alone for source in row)]

    def reads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        again = [DepthQuery(w, query.scales, query.biases) for w, query in zip(tensors[:2], queries, strict=True)]
        return tuple(two_phases(tensors[2:5], [[tensors[5]], [tensors[6]]], again))

    assert torch.autograd.gradcheck(reads, inputs)


def test_two_phases_keep_no_finding_for_backward() -> None:
    reads, shared = 3, 4
    sources, alone, queries = several(reads, shared, 1, torch.float32)
    inputs = [*(query.w_nK for query in queries), *sources, *(source for row in alone for source in row)]
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = two_phases(sources, alone, queries)
    for result in results:  # the sublayer that reads it keeps it
        assert kept.pop(result.untyped_storage().data_ptr()) == result.numel() * 4
    # A logit per read and source, an inverse RMS per source, log-sum-exps; and the queries' slices.
    per_token = reads * (shared + 1) + shared + reads + 3 * reads
    assert sum(kept.values()) <= (B * 19 * per_token + reads * (shared + 1) * D) * 4


def test_two_phases_inside_a_compiled_graph() -> None:
    sources, alone, queries = several(2, 3, 1, torch.float64)
    run = torch.compile(lambda: two_phases(sources, alone, queries), backend="aot_eager", fullgraph=True)
    for compiled, expected in zip(run(), two_phases(sources, alone, queries), strict=True):
        torch.testing.assert_close(compiled, expected, rtol=1e-12, atol=1e-12)
