"""How a fair, strong baseline is trained at each scale, and how its weights start. Variants get the same.

One consistent set: OLMo-core's model ladder, ``src/olmo_core/model_ladder/wsds_chinchilla_run_configurator.py`` at
commit fa6c501, which takes its laws from Porian et al. 2024 (arXiv:2406.19146). What does not depend on the scale is a
default of the run file, from the same source: AdamW with beta1 0.9 and epsilon 1e-8, weight decay 0.1 but none on the
embedding, gradient norm clipped to 1.0 (``transformer_model_configurator.py``), linear decay to zero (``WSDS`` in
``optim/scheduler.py``).

N, the size in these laws, is `Shape.matmul_parameters`: everything but the embedding look-up, the head included.
OLMo-core calls it ``num_non_embedding_params``; its models are untied, so the head's matrix stays in
(``nn/transformer/config.py``). Porian et al. count the same (``precise_param_count_open_lm`` in ``data.py`` of their
repository, formll/resolving-scaling-law-discrepancies).
"""

import math
from dataclasses import dataclass

from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import Shape

# Hoffmann et al. 2022 (arXiv:2203.15556, table 3) find about 20 tokens per parameter compute-optimal; OLMo-core's
# ``tokens_per_param`` is 20 too.
TOKENS_PER_PARAMETER = 20.0

# Linear and embedding matrices: a normal distribution cut off at three standard deviations (``init_linear`` and
# ``InitMethod.normal`` in OLMo-core's ``nn/transformer/init.py``). A tied embedding is the head too, so it cannot have
# the standard deviation 1 of an untied Llama embedding: nanoGPT (``model.py``) and torchtitan's Qwen 3
# (``models/qwen3/__init__.py``), both tied, use 0.02 as well.
INIT_STD = 0.02
EMBEDDING_STD = 0.02

_LAW_PARAMETERS = 108_000_000
_LAW_BATCH_TOKENS = 2048 * 160
# Halved by OLMo-core, which found that near optimal for its own models and schedule: those have QK-norm, norms behind
# the sublayers and a z-loss, and decay several times (WSD-S). This baseline has none of these, so the rate is a good
# start here, not a measured optimum: a study's `learning_rates` finds it.
_LAW_LR = 0.0047 / 2
_LARGE_BATCH_TOKENS = 524_288
_DECAY_FRACTION = 0.1

# Porian et al. fit the law from this size on (``get_interpolated_hparams_dfs`` in ``analysis.py``). Below it the law
# would go on raising the learning rate, past 1e-2 at 1.2M parameters. A trial there (300 steps of 4,096 characters)
# already ended 0.08 nats worse with 6.5e-3 than with 1e-3 or 3e-3.
_SMALLEST_LAW_PARAMETERS = 25_000_000

# The best batch grows with the tokens of the run: nanochat's ``scripts/base_train.py``, after Bergsma et al. 2025
# (arXiv:2505.13738). The law above is for compute-optimal runs; this carries it to longer ones and to shorter ones,
# which a batch meant for 20 tokens per parameter would leave with a handful of steps.
_BATCH_TOKENS_EXPONENT = 0.383

# A tiny model's batch stays divisible among 8 ranks, and its gradient is an average over several documents.
_FEWEST_SEQUENCES = 8


@dataclass(frozen=True)
class Recipe:
    """What depends on the scale of a run.

    Attributes:
        lr: peak learning rate of AdamW.
        batch_tokens: tokens in one optimizer step, over all ranks; a multiple of the sequence length.
        beta2: decay of AdamW's second moment.
        steps: length of the run in optimizer steps.
        warmup_steps: steps of linear warm-up from zero.
        decay_fraction: share of the run, at its end, over which the learning rate falls to its minimum.
    """

    lr: float
    batch_tokens: int
    beta2: float
    steps: int
    warmup_steps: int
    decay_fraction: float


def compute_optimal_tokens(shape: Shape, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> int:
    """Return a run's length in tokens: ``tokens_per_parameter`` for each of N."""
    return round(tokens_per_parameter * shape.matmul_parameters())


def residual_std(layers: int) -> float:
    """Return the initial standard deviation of the two projections per layer that write to the residual stream.

    ``INIT_STD / sqrt(2 layers)``: GPT-2 (Radford et al. 2019, section 2.3), as in nanoGPT's ``model.py`` and
    torchtitan's ``models/qwen3/__init__.py``. OLMo-core needs no such factor because its layers normalise what they
    write; these do not.
    """
    return INIT_STD / math.sqrt(2 * layers)


def recipe_for(
    shape: Shape,
    *,
    seq_len: int,
    batch_tokens: int | None = None,
    total_tokens: int | None = None,
    steps: int | None = None,
    where: str = "training",
) -> Recipe:
    """Return the recipe of a run of ``total_tokens`` tokens or ``steps`` steps, by default compute-optimal.

    With ``D = total_tokens`` and ``M = N / 108e6``::

        batch        327,680 M^(2/3) (D / 20 N)^0.383 tokens, to a power of two of sequences, 8 or more
        lr           0.00235 M^(-1/3), as if N were 25e6 or more; for a batch that is b < 1 times a compute-optimal
                     run's, sqrt(b) of that
        beta2        0.95 for 524,288 tokens per batch or more, else 0.99
        warm-up      N tokens, but no more than a tenth of the run

    The factor sqrt(b) is AdamW's rule for small batches (Malladi et al. 2022, arXiv:2205.10287), used by nanochat's
    ``scripts/base_train.py`` too. A larger batch does not raise the learning rate: at OLMo-core it depends on N alone.
    The shape is that of the plain decoder, so that a variant with a few more parameters gets the same recipe.

    Raises:
        UserError: the batch does not hold whole sequences, or the run is shorter than one batch; the message starts
            with ``where``.
    """
    if total_tokens is not None and steps is not None:
        raise UserError(f"{where}: {total_tokens} tokens and {steps} steps both say how long the run is; keep one")
    if steps is not None and steps < 1:
        raise UserError(f"{where}: a run takes 1 step or more, not {steps}")
    n = shape.matmul_parameters()
    optimal = compute_optimal_tokens(shape)
    budget = optimal if total_tokens is None else total_tokens
    if batch_tokens is None:
        batch_tokens = seq_len * _sequences(n, seq_len, budget, steps)
    elif batch_tokens < 1 or batch_tokens % seq_len:
        whole = seq_len * max(1, round(batch_tokens / seq_len))
        raise UserError(f"{where}: a batch of {batch_tokens} tokens is not whole sequences of {seq_len}; try {whole}")
    if steps is None:
        steps = budget // batch_tokens
        if steps < 1:
            raise UserError(
                f"{where}: a run of {budget} tokens is shorter than one batch of {batch_tokens}; "
                f"train on {batch_tokens} tokens or more, or make the batch smaller (one sequence is {seq_len})"
            )
    lr = _LAW_LR * (max(n, _SMALLEST_LAW_PARAMETERS) / _LAW_PARAMETERS) ** (-1 / 3)
    return Recipe(
        lr=lr * min(1.0, batch_tokens / (seq_len * _sequences(n, seq_len, optimal, None))) ** 0.5,
        batch_tokens=batch_tokens,
        beta2=0.95 if batch_tokens >= _LARGE_BATCH_TOKENS else 0.99,
        steps=steps,
        warmup_steps=max(1, min(round(n / batch_tokens), steps // 10)),
        decay_fraction=_DECAY_FRACTION,
    )


def law_batch_tokens(shape: Shape, total_tokens: int) -> float:
    """Return the batch of the law in `recipe_for` for a run of ``total_tokens``, before it is rounded."""
    return _law_batch_tokens(shape.matmul_parameters(), total_tokens, None)


def _law_batch_tokens(n: int, budget: int, steps: int | None) -> float:
    """Return the batch of ``n`` parameters for ``steps`` steps or else for ``budget`` tokens, not rounded."""
    optimal = TOKENS_PER_PARAMETER * n
    batch = _LAW_BATCH_TOKENS * (n / _LAW_PARAMETERS) ** (2 / 3)
    if steps is None:
        return batch * (max(budget, 1) / optimal) ** _BATCH_TOKENS_EXPONENT
    # The tokens are steps x batch, so the law has the batch on both sides; this is its solution.
    return (batch * (steps / optimal) ** _BATCH_TOKENS_EXPONENT) ** (1 / (1 - _BATCH_TOKENS_EXPONENT))


def _sequences(n: int, seq_len: int, budget: int, steps: int | None) -> int:
    """Return the sequences per batch of ``n`` parameters, for ``steps`` steps or else for ``budget`` tokens."""
    batch = _law_batch_tokens(n, budget, steps)
    # A power of two, so that 1, 2, 4, 8... ranks share it; nanochat's base_train.py rounds its batch in the same way.
    return max(_FEWEST_SEQUENCES, 2 ** max(0, round(math.log2(batch / seq_len))))
