"""Mixture-of-depths attention against a loop over tokens and heads, against one softmax, and against numerical
gradients."""

from typing import Any

import pytest
import torch

from torchtitan_ext.ops import moda

HEAD = 8


def inputs(
    entries: int,
    *,
    heads: int = 4,
    key_heads: int = 2,
    tokens: int = 9,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[torch.Tensor]:
    """q, k, v, then the depth keys, then the depth values; tensors of 2 sequences that record gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> torch.Tensor:
        drawn = torch.randn(2, tokens, n, HEAD, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    return [draw(heads), *(draw(key_heads) for _ in range(2 + 2 * entries))]


def split(
    tensors: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    q, k, v, *depth = tensors
    half = len(depth) // 2
    return q, k, v, depth[:half], depth[half:]


def documents(tokens: int) -> torch.Tensor:
    """Two sequences with documents of different lengths, [2, 1, T, T]."""
    document = torch.zeros(2, tokens, dtype=torch.long)
    document[0, tokens // 2 :] = 1
    document[1, 1:] = 1
    document[1, tokens - 2 :] = 2
    return (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1)


def by_loops(tensors: list[torch.Tensor], allowed: torch.Tensor | None) -> torch.Tensor:
    """The definition, one logit at a time."""
    q, k, v, depth_keys, depth_values = split([tensor.detach() for tensor in tensors])
    batch, tokens, heads, _ = q.shape
    out = torch.zeros_like(q)
    for b in range(batch):
        for t in range(tokens):
            for n in range(heads):
                g = n // (heads // k.shape[2])
                seen = [s for s in range(t + 1) if allowed is None or allowed[b, 0, t, s]]
                keys = [k[b, s, g] for s in seen] + [key[b, t, g] for key in depth_keys]
                values = [v[b, s, g] for s in seen] + [value[b, t, g] for value in depth_values]
                p = torch.stack([q[b, t, n] @ key * HEAD**-0.5 for key in keys]).softmax(0)
                out[b, t, n] = sum(weight * value for weight, value in zip(p, values, strict=True))
    return out


MASKS = [None, documents(9)]


@pytest.mark.parametrize("allowed", MASKS, ids=["causal", "documents"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("entries", [1, 3, 11])
def test_reference_equals_the_definition(entries: int, key_heads: int, allowed: torch.Tensor | None) -> None:
    tensors = inputs(entries, key_heads=key_heads)
    got = moda.reference(*split(tensors), allowed=allowed)
    torch.testing.assert_close(got, by_loops(tensors, allowed), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("allowed", MASKS, ids=["causal", "documents"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("entries", [1, 2, 3, 8, 11, 16])
def test_joined_parts_equal_one_softmax_forward_and_backward(
    entries: int, key_heads: int, allowed: torch.Tensor | None
) -> None:
    tensors = inputs(entries, key_heads=key_heads)
    got = moda.attend_with_depth(*split(tensors), allowed=allowed)
    expected = moda.reference(*split(tensors), allowed=allowed)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((got * weight).sum(), tensors)
    for gradient, reference in zip(gradients, torch.autograd.grad((expected * weight).sum(), tensors), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("allowed", [None, documents(5)], ids=["causal", "documents"])
@pytest.mark.parametrize("entries", [1, 3])
def test_gradients_are_the_numerical_ones(entries: int, allowed: torch.Tensor | None) -> None:
    tensors = inputs(entries, heads=2, key_heads=1, tokens=5)
    assert torch.autograd.gradcheck(lambda *t: moda.attend_with_depth(*split(list(t)), allowed=allowed), tensors)


@pytest.mark.parametrize("entries", [1, 3])
def test_gradients_flow_through_output_and_log_sum_exp(entries: int) -> None:
    """``join_depth`` alone: its sequence part may come from anywhere."""
    q, _, _, *depth = inputs(entries, heads=2, key_heads=1, tokens=4)
    generator = torch.Generator().manual_seed(2)
    out = torch.randn(q.shape, generator=generator, dtype=torch.float64).requires_grad_()
    lse = torch.randn(q.shape[:-1], generator=generator, dtype=torch.float64).requires_grad_()

    def join(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, *depth: torch.Tensor) -> torch.Tensor:
        return moda.join_depth(out, lse, q, depth[:entries], depth[entries:])

    assert torch.autograd.gradcheck(join, (out, lse, q, *depth))


@pytest.mark.parametrize("entries", [1, 11])
def test_join_equals_one_softmax(entries: int) -> None:
    tensors = inputs(entries)
    q, k, v, depth_keys, depth_values = split(tensors)
    scores = torch.einsum("btnh,bsnh->btns", q, k.repeat_interleave(2, dim=2)) * HEAD**-0.5
    scores = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril()[:, None], -torch.inf)
    out = torch.einsum("btns,bsnh->btnh", scores.softmax(-1), v.repeat_interleave(2, dim=2))
    got = moda.join_depth(out, scores.logsumexp(-1), q, depth_keys, depth_values)
    expected = moda.reference(*split(tensors))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(got.square().sum(), tensors)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected.square().sum(), tensors), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 11])
def test_half_precision_loses_what_half_precision_loses(entries: int) -> None:
    """Against fp64 on the same bf16 numbers. Rounding to bf16 is off by 2^-9 of a number at most. Two roundings lead to
    an output (probabilities in the kernel, the output) and four to a gradient (the output in ⟨∂o, o⟩, probabilities
    and their gradients in the kernel, the gradient): 2^-8 and 2^-7 of a tensor's length at most."""
    half = inputs(entries, tokens=64, dtype=torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    weight = torch.randn(half[0].shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    got, expected = moda.attend_with_depth(*split(half)), moda.reference(*split(exact))
    assert got.dtype == torch.bfloat16
    gradients = torch.autograd.grad((got * weight).sum(), half)
    references = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert (got.double() - expected).norm() <= 2**-8 * expected.norm()
    for gradient, reference in zip(gradients, references, strict=True):
        assert (gradient.double() - reference).norm() <= 2**-7 * reference.norm()


@pytest.mark.parametrize("size", [1e3, 1e-30])
def test_extreme_logits_stay_finite(size: float) -> None:
    tensors = [(size * tensor).detach().requires_grad_() for tensor in inputs(3, dtype=torch.float32)]
    out = moda.attend_with_depth(*split(tensors))
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert gradient.isfinite().all()


def test_a_depth_entry_is_read_at_its_own_token_alone() -> None:
    tensors = inputs(3)
    q, k, v, depth_keys, depth_values = split(tensors)
    before = moda.attend_with_depth(q, k, v, depth_keys, depth_values)
    for changed in (depth_keys, depth_values):
        others = [tensor.detach().clone() for tensor in changed]
        others[1][:, 5] += 1
        entries = (others, depth_values) if changed is depth_keys else (depth_keys, others)
        same = (moda.attend_with_depth(q, k, v, *entries) == before).all(dim=-1).all(dim=-1)
        assert same.tolist() == [[t != 5 for t in range(9)]] * 2


def test_the_backward_pass_keeps_no_copies_and_no_scores() -> None:
    """What is saved beyond the inputs is the output and one number per token and head."""
    tensors = inputs(11, tokens=64)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = moda.attend_with_depth(*split(tensors))
    for tensor in tensors:
        del kept[tensor.untyped_storage().data_ptr()]
    assert sum(kept.values()) == out.nbytes + out[..., 0].numel() * out.element_size()


def test_entries_are_handled_in_chunks_of_one_size() -> None:
    """Functions that are compiled per size compile once, however many entries there are."""
    seen: list[int] = []

    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = arguments[3:5]
        seen.append(len(keys))
        assert len({id(tensor) for tensor in (*keys, *values)}) == 2 * len(keys), "every tensor is one of its own"
        return moda.depth_forward(*arguments)

    for entries in range(1, 40):
        seen.clear()
        tensors = inputs(entries, tokens=2)
        moda.attend_with_depth(*split(tensors), kernels=moda.DepthKernels(forward=forward))
        assert seen == [moda.CHUNK] * -(-entries // moda.CHUNK)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("entries", [1, 11])
def test_gpu_kernels_equal_one_softmax(entries: int, heads: tuple[int, int]) -> None:
    half = [
        tensor.detach().cuda().requires_grad_()
        for tensor in inputs(entries, heads=heads[0], key_heads=heads[1], tokens=64, dtype=torch.bfloat16)
    ]
    assert moda._has_flash(*half[:3], None)
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    weight = torch.randn(half[0].shape, generator=torch.Generator().manual_seed(3)).to(half[0])
    got, expected = moda.attend_with_depth(*split(half)), moda.reference(*split(exact))
    gradients = torch.autograd.grad((got * weight).sum(), half)
    references = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert (got.double() - expected).norm() <= 2**-8 * expected.norm()
    for gradient, reference in zip(gradients, references, strict=True):
        assert (gradient.double() - reference).norm() <= 2**-7 * reference.norm()
