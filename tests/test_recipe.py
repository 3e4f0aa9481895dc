"""The recipe against the numbers that its sources' formulas give by hand."""

import math

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.recipe import (
    EMBEDDING_STD,
    INIT_STD,
    Recipe,
    compute_optimal_tokens,
    recipe_for,
    residual_std,
)
from torchtitan_ext.sizes import SIZES, Shape, shape_of

GPT2_VOCAB = 50_304
LADDER = ["100M", "200M", "350M", "500M", "750M", "1B", "1.5B"]


def shape_with(n: int, *, tied: bool = True) -> Shape:
    """A shape with exactly ``n`` parameters in matrix products, for an ``n`` that the arithmetic below likes.

    One layer of width 2 has 2 x 4 + 2 x 4 in attention, 3 x 2 in the feed-forward, 3 x 2 norm gains; the vocabulary
    makes up the rest, two at a time.
    """
    shape = Shape(layers=1, width=2, heads=1, kv_heads=1, ffn_width=1, vocab_size=(n - 28) // 2, tied=tied)
    assert shape.matmul_parameters() == n
    return shape


def test_at_the_laws_reference_size() -> None:
    # N = 108M, the size the law is stated at: 0.0047 / 2, and 160 sequences of 2,048 tokens, of which the nearest power
    # of two is 128 (log2 160 = 7.3). 20 x 108M tokens in steps of 262,144 are 8,239; one token per parameter is 412.
    assert recipe_for(shape_with(108_000_000), seq_len=2048) == Recipe(
        lr=0.00235, batch_tokens=128 * 2048, beta2=0.99, steps=8239, warmup_steps=412, decay_fraction=0.1
    )


def test_at_eight_times_the_reference_size() -> None:
    # N = 8 x 108M: the learning rate halves (8^(-1/3)), the batch is four times 160 sequences (8^(2/3)) = 640, to 512,
    # which is 1,048,576 tokens, so beta2 is the one for large batches.
    recipe = recipe_for(shape_with(864_000_000), seq_len=2048)
    assert recipe.lr == pytest.approx(0.00235 / 2, rel=1e-12)
    assert (recipe.batch_tokens, recipe.beta2) == (512 * 2048, 0.95)
    assert (recipe.steps, recipe.warmup_steps) == (20 * 864_000_000 // 1_048_576, round(864_000_000 / 1_048_576))


def test_500m() -> None:
    # N / 108M = 506,734,080 / 108,000,000 = 4.69198; its cube root is 1.67413 (1.67413^3 = 4.69211).
    # lr = 0.00235 / 1.67413 = 0.0014037; batch = 327,680 x 1.67413^2 = 918,397 tokens = 897 of 1,024, to 1,024.
    recipe = recipe_for(shape_of("500M", GPT2_VOCAB), seq_len=1024)
    assert recipe.lr == pytest.approx(0.0014037, rel=1e-4)
    assert recipe.batch_tokens == 1024 * 1024


def test_the_size_counts_the_head_but_not_the_look_up() -> None:
    # OLMo-core's and Porian et al.'s N: the same with a tied matrix and with two.
    tied, untied = shape_of("200M", GPT2_VOCAB), shape_of("200M", GPT2_VOCAB, tied=False)
    assert untied.parameters() - tied.parameters() == 768 * GPT2_VOCAB
    assert recipe_for(tied, seq_len=1024) == recipe_for(untied, seq_len=1024)


def test_no_learning_rate_beyond_the_smallest_model_of_the_law() -> None:
    # 108M / 25M = 4.32, whose cube root is 1.62865 (1.62865^3 = 4.32000): 0.00235 x 1.62865 = 0.0038273.
    tiny = [recipe_for(shape_of(size, 128), seq_len=64).lr for size in ("debug", "1.2M", "10M")]
    assert tiny == pytest.approx([0.0038273] * 3, rel=1e-4)
    assert recipe_for(shape_with(26_000_000), seq_len=64).lr < tiny[0]


def test_larger_models_learn_slower_in_larger_batches() -> None:
    recipes = [recipe_for(shape_of(size, GPT2_VOCAB), seq_len=1024) for size in LADDER]
    lrs, batches = [r.lr for r in recipes], [r.batch_tokens for r in recipes]
    assert lrs == sorted(lrs, reverse=True)
    assert len(set(lrs)) == len(lrs)
    assert batches == sorted(batches)
    assert batches[-1] > batches[0]
    assert all(recipe.beta2 == (0.95 if recipe.batch_tokens >= 524_288 else 0.99) for recipe in recipes)
    assert {recipe.beta2 for recipe in recipes} == {0.95, 0.99}


@pytest.mark.parametrize("seq_len", [64, 1000, 4096])
@pytest.mark.parametrize("size", SIZES)
def test_every_batch_is_shared_evenly_and_near_the_law(size: str, seq_len: int) -> None:
    shape = shape_of(size, 256 if size in ("debug", "1.2M", "10M") else GPT2_VOCAB)
    recipe = recipe_for(shape, seq_len=seq_len)
    sequences, rest = divmod(recipe.batch_tokens, seq_len)
    assert rest == 0
    assert sequences >= 8
    assert sequences & (sequences - 1) == 0
    law = 327_680 * (shape.matmul_parameters() / 108e6) ** (2 / 3)
    if law >= 8 * seq_len:
        assert abs(math.log2(recipe.batch_tokens / law)) <= 0.5
    else:
        assert sequences == 8
    assert 1 <= recipe.warmup_steps <= recipe.steps / 10
    assert abs(recipe.steps * recipe.batch_tokens - 20 * shape.matmul_parameters()) < recipe.batch_tokens


def test_the_batch_grows_with_the_data() -> None:
    # 2^(1 / 0.383) = 6.11: so many times the tokens double the batch. At N = 8 x 108M: 640 sequences by the law become
    # 1,280 and 320, to 1,024 and 256.
    shape = shape_with(864_000_000)
    optimal = 20 * 864_000_000
    batches = [
        recipe_for(shape, seq_len=2048, total_tokens=round(optimal * 6.11**power)).batch_tokens // 2048
        for power in (-1, 0, 1)
    ]
    assert batches == [256, 512, 1024]
    assert recipe_for(shape, seq_len=2048, total_tokens=optimal) == recipe_for(shape, seq_len=2048)


@pytest.mark.parametrize("steps", [100, 1000, 100_000])
def test_a_run_in_steps_solves_the_law_for_the_batch(steps: int) -> None:
    # D = steps x batch puts the batch on both sides of the law. The batch that solves it lies within half a doubling of
    # the power of two that is returned: the two sides change places in between.
    shape = shape_of("200M", GPT2_VOCAB)
    recipe = recipe_for(shape, seq_len=1, steps=steps)
    assert recipe.steps == steps
    law = 327_680 * (shape.matmul_parameters() / 108e6) ** (2 / 3)
    low, high = recipe.batch_tokens / 2**0.5, recipe.batch_tokens * 2**0.5

    def gap(batch: float) -> float:
        return batch - law * (steps * batch / (20 * shape.matmul_parameters())) ** 0.383

    assert gap(low) <= 0 <= gap(high)


def test_a_short_run_takes_small_steps_rather_than_few() -> None:
    shape = shape_of("10M", 4096)
    full, short = recipe_for(shape, seq_len=256), recipe_for(shape, seq_len=256, total_tokens=2_000_000)
    assert short.batch_tokens < full.batch_tokens
    assert short.steps > 2_000_000 // full.batch_tokens
    assert short.lr < full.lr
    assert short.warmup_steps == short.steps // 10


def test_a_small_batch_learns_slower_by_its_square_root() -> None:
    # At N = 108M the compute-optimal batch is 128 sequences of 2,048 and the learning rate 0.00235: 32 sequences halve
    # it, 2 sequences divide it by 8, and 256 leave it alone. 163,000,000 tokens are 0.0755 of 20 N, and
    # 0.0755^0.383 x 160 = 59.5 sequences, to 64, half of 128.
    shape = shape_with(108_000_000)
    lrs = [recipe_for(shape, seq_len=2048, batch_tokens=count * 2048).lr for count in (128, 32, 2, 256)]
    assert lrs == pytest.approx([0.00235, 0.00235 / 2, 0.00235 / 8, 0.00235], rel=1e-12)
    short = recipe_for(shape, seq_len=2048, total_tokens=163_000_000)
    assert (short.batch_tokens, short.lr) == (64 * 2048, pytest.approx(0.00235 / math.sqrt(2), rel=1e-12))


def test_a_given_batch_changes_beta2_and_the_steps() -> None:
    shape = shape_of("500M", GPT2_VOCAB)
    own = recipe_for(shape, seq_len=1024, total_tokens=10_000_000_000)
    small = recipe_for(shape, seq_len=1024, batch_tokens=12 * 1024, total_tokens=10_000_000_000)
    assert (own.beta2, small.beta2, small.batch_tokens) == (0.95, 0.99, 12 * 1024)
    assert small.steps == 10_000_000_000 // (12 * 1024)
    assert small.warmup_steps == round(shape.parameters() / (12 * 1024))
    edge = [recipe_for(shape, seq_len=1024, batch_tokens=tokens, steps=10).beta2 for tokens in (523_264, 524_288)]
    assert edge == [0.99, 0.95]


@pytest.mark.parametrize("steps", [1, 9, 10, 19, 20])
def test_warm_up_of_tiny_runs(steps: int) -> None:
    recipe = recipe_for(shape_of("debug", 256), seq_len=64, batch_tokens=512, steps=steps)
    assert (recipe.steps, recipe.warmup_steps) == (steps, max(1, steps // 10))


def test_a_budget_never_asks_for_more_tokens_than_given() -> None:
    recipe = recipe_for(shape_of("debug", 256), seq_len=64, batch_tokens=640, total_tokens=1279)
    assert recipe.steps == 1


def test_compute_optimal_tokens() -> None:
    assert compute_optimal_tokens(shape_with(1000)) == 20_000
    assert compute_optimal_tokens(shape_with(1000), 0.5) == 500
    assert compute_optimal_tokens(shape_with(1000, tied=False)) == 20_000


def test_initial_standard_deviations() -> None:
    # 0.02 / sqrt(2 x 8) = 0.005; 0.02 / sqrt(2 x 50) = 0.002.
    assert (residual_std(8), residual_std(50)) == pytest.approx((0.005, 0.002), rel=1e-12)
    assert (INIT_STD, EMBEDDING_STD) == (0.02, 0.02)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_tokens": 1000}, ["1000 tokens", "sequences of 64", "try 1024"]),
        ({"batch_tokens": 10}, ["10 tokens", "try 64"]),
        ({"batch_tokens": 0}, ["0 tokens", "try 64"]),
        ({"batch_tokens": -64}, ["-64 tokens", "try 64"]),
        ({"total_tokens": 100}, ["100 tokens", "one batch of 512", "512 tokens or more", "64"]),
        ({"total_tokens": 0}, ["0 tokens", "one batch of 512"]),
        ({"total_tokens": 1000, "batch_tokens": 1024}, ["1000 tokens", "one batch of 1024"]),
        ({"steps": 0}, ["1 step or more", "not 0"]),
        ({"total_tokens": 5120, "steps": 10}, ["5120 tokens", "10 steps", "keep one"]),
    ],
)
def test_errors_say_what_to_do(arguments: dict[str, int], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        recipe_for(shape_of("debug", 256), seq_len=64, where="run.yaml:7", **arguments)
    message = str(error.value)
    assert message.startswith("run.yaml:7: ")
    assert "\n" not in message
    assert all(word in message for word in words), message
