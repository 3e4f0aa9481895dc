"""Tokens are drawn from the distribution that was asked for."""

from collections.abc import Callable

import pytest
import torch

from eval.evaluate.sample import Sampling, generate, probabilities
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import Restored, restore

MakeRun = Callable[..., RunFolder]
EOT = 0
PROMPTS = [[EOT, 20, 21, 22, 23], [EOT], [EOT, 90, 91]]

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64))


def close(got: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_temperature_is_a_power_of_the_probabilities() -> None:
    close(probabilities(LOGITS, Sampling()), LOGITS.exp().tolist())
    total = 0.01 + 0.16 + 0.04 + 0.09
    close(
        probabilities(LOGITS, Sampling(temperature=0.5)),
        [[0.01 / total, 0.16 / total, 0.04 / total, 0.09 / total], [0.25] * 4],
    )


def test_top_k_keeps_the_k_likeliest() -> None:
    close(probabilities(LOGITS[:1], Sampling(top_k=2)), [[0, 4 / 7, 0, 3 / 7]])
    close(probabilities(LOGITS[:1], Sampling(top_k=4)), [[0.1, 0.4, 0.2, 0.3]])
    close(probabilities(LOGITS[:1], Sampling(top_k=9)), [[0.1, 0.4, 0.2, 0.3]])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.05, [0, 1, 0, 0]), (0.39, [0, 1, 0, 0]), (0.5, [0, 4 / 7, 0, 3 / 7]), (0.8, [0, 4 / 9, 2 / 9, 3 / 9])],
)
def test_top_p_keeps_the_fewest_that_reach_the_share(top_p: float, kept: list[float]) -> None:
    close(probabilities(LOGITS[:1], Sampling(top_p=top_p)), [kept])


def test_top_k_comes_before_top_p() -> None:
    """The two likeliest make 4/7 and 3/7, of which the first alone has half; of all four it would have 0.4."""
    close(probabilities(LOGITS[:1], Sampling(top_k=2, top_p=0.5)), [[0, 1, 0, 0]])


@pytest.fixture(scope="module")
def restored(standard: RunFolder) -> Restored:
    return restore(standard, device=torch.device("cpu"))


def write(
    restored: Restored, sampling: Sampling, prompts: list[list[int]] = PROMPTS, max_tokens: int = 12, **more: object
) -> list[list[int]]:
    settings = {"window": 64, "eot_id": EOT, "vocab_size": 512, "document_mask": False, **more}
    return generate(restored.model, prompts, max_tokens=max_tokens, sampling=sampling, **settings)


@pytest.mark.parametrize("variant", ["standard", "moda"])
@pytest.mark.parametrize("documents", ["false", "true"])
def test_greedy_text_is_the_likeliest_token_every_time(make_run: MakeRun, variant: str, documents: str) -> None:
    """Against whole forward passes without a cache, prompt by prompt."""
    name = f"greedy_{variant}_{documents}"
    folder = make_run(name, "--model.variant", variant, "--data.document_mask", documents)
    model = restore(folder, device=torch.device("cpu")).model
    got = write(Restored(model, 0, None), Sampling(temperature=0), document_mask=documents == "true")
    for prompt, written in zip(PROMPTS, got, strict=True):
        tokens = list(prompt)
        for _ in range(12):
            positions = torch.arange(len(tokens))[None]
            if documents == "true" and len(tokens) > 1:
                positions = torch.tensor([[0, *range(len(tokens) - 1)]])
            choice = int(model(torch.tensor([tokens]), positions=positions)[0, -1, :512].argmax())
            if choice == EOT:
                break
            tokens.append(choice)
        assert written == tokens[len(prompt) :]
        assert written or prompt == [EOT], "a test of nothing otherwise"


def test_a_seed_gives_the_same_text_again_and_another_seed_another(restored: Restored) -> None:
    first = write(restored, Sampling(seed=1))
    assert write(restored, Sampling(seed=1)) == first
    assert write(restored, Sampling(seed=2)) != first


def test_a_row_does_not_depend_on_those_beside_it(restored: Restored) -> None:
    assert write(restored, Sampling(), PROMPTS[:1]) == write(restored, Sampling())[:1]
    twice = write(restored, Sampling(), [PROMPTS[0]] * 2)
    assert twice[0] != twice[1], "the same prompt twice gives two samples"


def test_drawn_tokens_follow_the_model(restored: Restored) -> None:
    """2,000 first tokens against the model's own distribution: the χ² of the likeliest eight and the rest."""
    sampling = Sampling(temperature=0.4, top_k=8)
    with torch.no_grad():
        logits = restored.model(torch.tensor([PROMPTS[0]]))[:, -1, :512].double()
    p = probabilities(logits, sampling)[0]
    drawn = write(restored, sampling, [PROMPTS[0]] * 2000, max_tokens=1)
    # An end-of-text token is not returned: an empty row.
    counts = torch.bincount(torch.tensor([row[0] if row else EOT for row in drawn]), minlength=512)
    likely = p > 0
    assert int(likely.sum()) == 8
    assert int(counts[likely].sum()) == 2000
    chi = ((counts[likely] - 2000 * p[likely]) ** 2 / (2000 * p[likely])).sum()
    assert chi < 24.3, "the 99.9% point of χ² with 7 degrees of freedom"


def test_text_ends_with_the_window_and_never_leaves_the_vocabulary(restored: Restored) -> None:
    rows = write(restored, Sampling(temperature=50.0), [[EOT, *range(40, 100)], [EOT]], max_tokens=500, vocab_size=300)
    assert len(rows[0]) <= 3
    assert len(rows[1]) <= 63
    assert max(len(row) for row in rows) > 10
    assert all(token < 300 for row in rows for token in row)
    assert write(restored, Sampling(), [[EOT] * 64]) == [[]], "no room"


def test_text_ends_where_it_is_told_to(restored: Restored) -> None:
    rows = write(restored, Sampling(temperature=0), stop=lambda tokens: len(tokens) == 3)
    assert [len(row) for row in rows] == [3, 3, 3]


def test_the_end_of_a_document_ends_the_text(restored: Restored) -> None:
    """With a token of a text declared to be the end of text, the text is what came before that token."""
    whole = write(restored, Sampling(seed=3), PROMPTS[:1])[0]
    end = whole[5]
    assert write(restored, Sampling(seed=3), PROMPTS[:1], eot_id=end) == [whole[: whole.index(end)]]
