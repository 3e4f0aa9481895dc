"""The held-out loss is exact: every window once, on any number of ranks, equal to a direct computation in fp64."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from data_prep.dataset import TokenDataset
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.sizes import shape_of
from torchtitan_ext.titan.heldout import HeldOut, HeldOutLoss

SEQ_LEN = 64
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> DepthDecoder:
    shape = shape_of("debug", 512)
    model = decoder_config(shape, Variant(), seq_len=SEQ_LEN, inner_attention=FusedAttention.Config()).build()
    model.init_states()
    return model


def heldout(dataset: Path, rank: int = 0, ranks: int = 1, micro_batch: int = 4, tokens: int = 10**9) -> HeldOut:
    return HeldOut(
        TokenDataset.open(dataset),
        seq_len=SEQ_LEN,
        tokens=tokens,
        micro_batch=micro_batch,
        document_mask=False,
        rank=rank,
        ranks=ranks,
    )


def test_it_equals_a_direct_computation(dataset: Path, model: DepthDecoder) -> None:
    data = TokenDataset.open(dataset)
    found = heldout(dataset, tokens=50 * SEQ_LEN)
    chosen = torch.stack([torch.from_numpy(found.windows[i].astype("int64")) for i in found.chosen])
    assert len(chosen) == 50
    exact = model.double()
    nats = text_bytes = 0.0
    with torch.no_grad():
        for window in chosen:
            log_probabilities = torch.log_softmax(exact(window[None, :-1])[0], dim=-1)
            nats -= log_probabilities[torch.arange(SEQ_LEN), window[1:]].sum().item()
            text_bytes += int(data.token_bytes()[window[1:].numpy()].sum())
    model.float()
    result = found.evaluate(model, nullcontext, CPU)
    assert result.tokens == 50 * SEQ_LEN
    assert result.nats == pytest.approx(nats, rel=1e-6)
    metrics = result.metrics()
    assert metrics["heldout/loss"] == pytest.approx(nats / (50 * SEQ_LEN), rel=1e-6)
    assert metrics["heldout/perplexity"] == pytest.approx(math.exp(nats / (50 * SEQ_LEN)), rel=1e-5)
    assert metrics["heldout/bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 4), (3, 5), (4, 1), (7, 16)])
def test_shares_of_any_number_of_ranks_add_up(dataset: Path, model: DepthDecoder, ranks: int, micro_batch: int) -> None:
    whole = heldout(dataset, tokens=6000).score_share(model, nullcontext, CPU)
    options = {"ranks": ranks, "micro_batch": micro_batch, "tokens": 6000}
    parts = [heldout(dataset, rank=rank, **options).score_share(model, nullcontext, CPU) for rank in range(ranks)]
    total = torch.stack(parts).sum(dim=0)
    assert total[1:].tolist() == whole[1:].tolist(), "tokens and bytes are counted once each"
    assert total[0].item() == pytest.approx(whole[0].item(), rel=1e-6)


def test_the_whole_split_has_the_bytes_of_its_text(dataset: Path, model: DepthDecoder) -> None:
    """Every token but the first of each window's overlap is scored once, so only the first and the rest are missing."""
    found = heldout(dataset, micro_batch=32)
    data = TokenDataset.open(dataset)
    split = data.split("heldout")
    scored = split.read(1, found.windows.n_windows * SEQ_LEN + 1)
    sums = found.score_share(model, nullcontext, CPU)
    assert sums[1] == len(scored)
    assert sums[2] == data.token_bytes()[scored].sum()


def test_evaluating_leaves_the_model_as_it_was(dataset: Path, model: DepthDecoder) -> None:
    model.train()
    model._skip_lm_head = True
    heldout(dataset, tokens=500).evaluate(model, nullcontext, CPU)
    assert model.training
    assert model._skip_lm_head
    model._skip_lm_head = False


def test_perplexity_of_a_hopeless_model_is_a_number() -> None:
    assert math.isfinite(HeldOutLoss(nats=1e6, tokens=10, text_bytes=10).metrics()["heldout/perplexity"])
