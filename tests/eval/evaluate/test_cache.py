"""Decoding with the cache gives, at every step and for every variant, what the whole forward pass gives."""

from zlib import crc32

import pytest
import torch

from data_prep.windows import document_positions
from eval.evaluate.cache import cached
from tests.strangers import STRANGERS
from torchtitan_ext.depth.attention import FusedAttention, document_mask
from torchtitan_ext.depth.attentions import ATTENTIONS
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.sizes import shape_of

VOCABULARY = 67
EVERY = {**VARIANTS, **STRANGERS}
EOT = 3
TOKENS = torch.tensor([[EOT, 11, 12, 13, EOT, 9, 8, 7, 6, 60, 61, 2], [5, 6, EOT, EOT, 7, 8, 9, 10, 11, 12, 13, 14]])


def model_of(variant: str, documents: bool, attention: str = "standard", block: str = "llama") -> DepthDecoder:
    """A debug model off its start, where depth weights, gates and gains all matter."""
    config = decoder_config(
        shape_of("debug", VOCABULARY, block=block, seq_len=32),
        EVERY[variant],
        ATTENTIONS[attention],
        seq_len=32,
        inner_attention=FusedAttention.Config(),
        make_mask=document_mask if documents else None,
    )
    for layer in config.layers:
        layer.attention.rope.max_seq_len = 32
    model = config.build()
    model.init_states()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def positions_of(tokens: torch.Tensor, documents: bool) -> torch.Tensor:
    if documents:
        return torch.from_numpy(document_positions(tokens.numpy(), EOT))
    return torch.arange(tokens.shape[1]).expand(tokens.shape)


@pytest.mark.parametrize("documents", [False, True], ids=["whole window", "documents"])
@pytest.mark.parametrize(
    ("variant", "attention", "block"),
    [
        *((name, "standard", "llama") for name in EVERY),
        *(("moda", "qk_norm", "llama"), ("m_gate_kv", "gate_elementwise", "llama"), ("moda", "standard", "gpt2")),
    ],
)
def test_cached_logits_equal_uncached_ones(variant: str, attention: str, block: str, documents: bool) -> None:
    """In fp64, where only the rotary positions (fp32 in both) and the order of sums differ."""
    model = model_of(variant, documents, attention, block)
    positions = positions_of(TOKENS, documents)
    with torch.no_grad():
        whole = model(TOKENS, positions=positions if documents else None)
    attentions = [layer.attention.inner_attention for layer in model.layers.values()]
    steps = [slice(0, 4), slice(4, 5), slice(5, 8), *(slice(t, t + 1) for t in range(8, 12))]
    with cached(model) as decoder:
        for step in steps:
            got = decoder(TOKENS[:, step], positions[:, step])
            torch.testing.assert_close(got, whole[:, step], rtol=1e-10, atol=1e-10, msg=f"{variant} {step}")
    assert [layer.attention.inner_attention for layer in model.layers.values()] == attentions, "put back"


@pytest.mark.parametrize("variant", ["standard", "moda"])
def test_what_fills_up_a_row_is_not_seen(variant: str) -> None:
    """A row that begins later, behind tokens of a document of their own, has the logits that it has alone."""
    model = model_of(variant, documents=False)
    with torch.no_grad():
        alone = model(TOKENS[:1, :5])
    filled = torch.cat([torch.full((1, 7), 40), TOKENS[:1, :5]], dim=1)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with cached(model) as decoder:
        got = decoder(filled, positions)
    torch.testing.assert_close(got[:, 7:], alone, rtol=1e-10, atol=1e-10)


def test_an_error_inside_leaves_the_model_whole() -> None:
    model = model_of("standard", documents=False)
    with pytest.raises(ZeroDivisionError), cached(model):
        raise ZeroDivisionError
    assert all(type(layer.attention.inner_attention) is FusedAttention for layer in model.layers.values())
