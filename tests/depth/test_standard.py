"""The standard variant is torchtitan's Llama 3, to the bit."""

import pytest
import torch
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.llama3.model import Llama3TransformerBlock

from torchtitan_ext.depth.attention import FusedAttention, document_mask
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.registry import variant_of
from torchtitan_ext.sizes import SIZES, shape_of

VOCABULARY = 256


def ours(size: str = "debug", **options: object) -> DepthDecoder.Config:
    shape = shape_of(size, VOCABULARY)
    attention = FusedAttention.Config()
    return decoder_config(shape, variant_of("standard"), seq_len=32, inner_attention=attention, **options)


def torchtitans(config: DepthDecoder.Config) -> Llama3Model.Config:
    """torchtitan's own model and blocks, from the same attention, feed-forward, norm and embedding configurations."""
    layers = [
        Llama3TransformerBlock.Config(
            attention=layer.attention,
            feed_forward=layer.feed_forward,
            attention_norm=layer.attention_norm,
            ffn_norm=layer.ffn_norm,
        )
        for layer in config.layers
    ]
    return Llama3Model.Config(
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.enable_weight_tying,
        tok_embeddings=config.tok_embeddings,
        norm=config.norm,
        lm_head=config.lm_head,
        layers=layers,
    )


@pytest.fixture
def pair() -> tuple[DepthDecoder, Llama3Model]:
    config = ours()
    model = config.build()
    model.init_states()
    reference = torchtitans(config).build()
    reference.load_state_dict(model.state_dict())
    return model, reference


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, **extras: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1], **extras)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def test_outputs_losses_and_gradients_are_equal_to_the_bit(pair: tuple[DepthDecoder, Llama3Model]) -> None:
    model, reference = pair
    tokens = torch.randint(VOCABULARY, (3, 33), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(tokens), reference(tokens))
    loss, expected = loss_of(model, tokens), loss_of(reference, tokens)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def test_positions_are_used_as_torchtitan_uses_them(pair: tuple[DepthDecoder, Llama3Model]) -> None:
    model, reference = pair
    tokens = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(32).remainder(11).expand(2, 32)
    assert torch.equal(loss_of(model, tokens, positions=positions), loss_of(reference, tokens, positions=positions))
    assert not torch.equal(loss_of(model, tokens, positions=positions), loss_of(model, tokens))


def test_parameters_have_torchtitans_names_and_shapes(pair: tuple[DepthDecoder, Llama3Model]) -> None:
    model, reference = pair
    assert {n: p.shape for n, p in model.state_dict().items()} == {
        n: p.shape for n, p in reference.state_dict().items()
    }
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]


@pytest.mark.parametrize("size", SIZES)
def test_counts_from_the_configuration_are_those_of_the_built_model(size: str) -> None:
    config = ours(size)
    with torch.device("meta"):
        model = config.build()
    shape = shape_of(size, VOCABULARY)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters()
    assert config.get_nparams_and_flops(model, 128) == (shape.parameters(), shape.flops_per_token(128))


def test_document_mask_equals_attending_to_each_document_alone() -> None:
    model = ours(make_mask=document_mask).build()
    model.init_states()
    generator = torch.Generator().manual_seed(3)
    first, second = torch.randint(VOCABULARY, (2, 1, 9), generator=generator)
    positions = torch.arange(9).repeat(2).unsqueeze(0)
    together = model(torch.cat([first, second], dim=1), positions=positions)
    alone = torch.cat([model(first, positions=positions[:, :9]), model(second, positions=positions[:, :9])], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_document_mask_allows_what_flex_attention_allows() -> None:
    """The rule that GPUs use for documents is torchtitan's own; the CPU's must be the same."""
    from torchtitan.models.common.attention import get_causal_mask_mod, get_document_mask_mod

    assert FlexAttention is not None
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [3, 4, 5, 6, 0, 1, 2, 3]])
    causal, same = get_causal_mask_mod(), get_document_mask_mod(positions)
    rows = range(positions.shape[1])
    expected = [[[bool(causal(b, 0, torch.tensor(q), torch.tensor(k)) & same(torch.tensor(b), 0, q, k)) for k in rows]
                 for q in rows] for b in range(2)]  # fmt: skip
    assert document_mask(positions)[:, 0].tolist() == expected
