"""How often ``depth compare`` is right, in simulated studies whose truth is known.

Losses are arm + seed + error, normal, judged as a report judges them. The error is by default as large as measured in
the study books_1m (five arms, three seeds). For each plan the rates are:

family-wise  share of studies without any true difference in which some variant is called better or worse
power        share of studies in which one variant that is better by --effect is called better
paired       the same for a paired t-test of each variant (Holm), which this replaced
unequal      share of studies in which the test for equal variances sets some arm aside

example: python benchmarks/compare_power.py --studies 20000
"""

import argparse

import numpy as np
from scipy import stats

from eval.compare.judging import Comparison, judge, make_pool
from eval.compare.statistics import LEVEL

PLANS = ((4, 2), (4, 3), (4, 6), (1, 3), (2, 3), (8, 3))
"""Variants, seeds."""
UNEQUAL = {"one variant's errors 3 times as large": (1, 3.0), "the baseline's errors 3 times as large": (0, 3.0)}
RATES = 3
"""Learning rates of the sweeps that are simulated."""


def studies(count: int, variants: int, seeds: int, error: float, seed: int) -> np.ndarray:
    """Losses [count, 1 + variants, seeds] without any true difference. What a seed adds cancels in every difference."""
    return np.random.default_rng(seed).normal(5.0, error, (count, 1 + variants, seeds))


def judged(losses: np.ndarray) -> tuple[list[Comparison | None], bool]:
    """Of one study, and whether an arm was set aside."""
    pool = make_pool(losses)
    return judge(losses, pool, pool.judged), bool(pool.set_aside)


def holm(p_values: np.ndarray) -> np.ndarray:
    """Adjusted p-values over the last axis."""
    order = np.argsort(p_values, axis=-1)
    factors = np.arange(p_values.shape[-1], 0, -1)
    stepped = np.maximum.accumulate(np.take_along_axis(p_values, order, -1) * factors, axis=-1)
    adjusted = np.empty_like(stepped)
    np.put_along_axis(adjusted, order, stepped, -1)
    return adjusted


def rates(losses: np.ndarray, effect: float = 0.0) -> dict[str, float]:
    """Rates over studies [count, 1 + variants, seeds]; the last variant is better by ``effect``."""
    shifted = losses.copy()
    shifted[:, -1] -= effect
    null = [judged(study) for study in losses]
    found = [judged(study)[0][-1] for study in shifted]
    differences = shifted[:, 1:] - shifted[:, :1]
    paired = holm(stats.ttest_1samp(differences, 0.0, axis=-1).pvalue)[:, -1] if losses.shape[-1] > 1 else np.ones(1)
    better = differences[:, -1].mean(-1) < 0
    return {
        "family-wise": float(np.mean([any(one is not None and one.sure for one in study) for study, _ in null])),
        "power": float(np.mean([one is not None and one.high < 0 for one in found])),
        "paired": float(np.mean((paired < LEVEL) & better)),
        "unequal": float(np.mean([aside for _, aside in null])),
    }


def swept(count: int, variants: int, seeds: int, error: float, seed: int, baseline: bool) -> np.ndarray:
    """Studies whose variants, and the baseline where ``baseline``, are each the best of ``RATES`` equal rates."""
    all_rates = np.random.default_rng(seed).normal(5.0, error, (count, 1 + variants, RATES, seeds))
    best = all_rates.mean(-1).argmin(-1)
    if not baseline:
        best[:, 0] = 0
    return np.take_along_axis(all_rates, best[:, :, None, None], 2)[:, :, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000, help="simulated for each plan (default: %(default)s)")
    parser.add_argument("--effect", type=float, default=0.056, help="in nats per token (default: %(default)s)")
    parser.add_argument("--error", type=float, default=0.0131, help="of a run, in nats (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    error = args.error
    print(f"error of a run {error:.4f} nats, effect {args.effect:g} nats, {args.studies} studies for each line")
    for variants, seeds in PLANS:
        losses = studies(args.studies, variants, seeds, error, args.seed)
        show(f"{variants} variants, {seeds} seeds", rates(losses, args.effect))
    losses = studies(args.studies, 4, 3, error, args.seed)
    for title, (arm, times) in UNEQUAL.items():
        scaled = losses.copy()
        scaled[:, arm] = 5.0 + (scaled[:, arm] - 5.0) * times
        show(f"4 variants, 3 seeds, {title}", rates(scaled, args.effect))
    gaps = losses.copy()
    gaps[:, 1, 0] = gaps[:, 2, 1] = np.nan
    found = [judged(study)[0] for study in gaps]
    wrong = float(np.mean([any(one is not None and one.sure for one in study) for study in found]))
    show("4 variants, 3 seeds, two runs missing", {"family-wise": wrong})
    for title, baseline in (("all arms", True), ("the variants alone", False)):
        one = swept(args.studies, 4, 3, error, args.seed, baseline)
        show(f"4 variants, 3 seeds, best of {RATES} rates for {title}", rates(one, args.effect))


def show(title: str, found: dict[str, float]) -> None:
    print(f"{title}: {', '.join(f'{name} {value:.3f}' for name, value in found.items())}", flush=True)


if __name__ == "__main__":
    main()
