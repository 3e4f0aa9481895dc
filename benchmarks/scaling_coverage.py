"""How often the intervals of scaling laws hold the truth, in simulated ladders whose laws are known.

A baseline and a variant that is worth 1.25 times the compute are given losses by a law, times errors of each run that
are normal and independent. Prints, for each plan of sizes, lengths and seeds, how many of the intervals hold the truth
(nominal: 95%): of E, of the exponent of compute or parameters, of the compute-equivalent gain at each size; or that
there are none.

example: python benchmarks/scaling_coverage.py --ladders 40
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eval.compare.compare import READ
from eval.compare.grouping import make_families
from eval.compare.run import Curve, Run
from eval.scaling.ladder import COMPUTE, SIZE_AND_DATA
from eval.scaling.results import Interval
from eval.scaling.scale import scale

SIZES = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9)
TOKENS_PER_PARAMETER = 20
LENGTHS = (2e8, 1e9, 6e9)
GAIN = 1.25
PLANS = ((COMPUTE, 4, 1), (COMPUTE, 5, 1), (COMPUTE, 6, 1), (COMPUTE, 3, 2), (COMPUTE, 3, 3), (COMPUTE, 4, 2),
         (COMPUTE, 4, 3), (SIZE_AND_DATA, 3, 1), (SIZE_AND_DATA, 3, 3), (SIZE_AND_DATA, 4, 1))  # fmt: skip
"""Law, number of sizes, seeds. Under ``L(N, D)`` each size is trained for each of ``LENGTHS``."""
IRREDUCIBLE = 1.7
EXPONENT = {COMPUTE: ("gamma", 0.1), SIZE_AND_DATA: ("alpha", 0.34)}


def loss(law: str, parameters: float, tokens: float, more: float) -> float:
    """``more``: how many times its compute a run is worth."""
    if law == COMPUTE:
        return IRREDUCIBLE + 60 * (more * 6 * parameters * tokens) ** -0.1
    grown = math.sqrt(more)
    return IRREDUCIBLE + 400 * (grown * parameters) ** -0.34 + 900 * (grown * tokens) ** -0.31


def make_run(variant: str, parameters: float, tokens: float, seed: int, final: float) -> Run:
    at = np.array([0.5, 1.0]) * tokens
    axes = {"tokens": at, "flops": 6 * parameters * at, "seconds": at}
    curve = Curve(np.array([1, 2]), np.array([final + 0.1, final]), axes)
    return Run(
        name=f"{variant}-{parameters:g}-{tokens:g}-s{seed}",
        path=Path(),
        variant=variant,
        size=f"{parameters:g}",
        seed=seed,
        heldout=curve,
        bits_per_byte=curve,
        training=curve,
        learning_rate=(np.array([0]), np.array([1.0])),
        costs={"tokens_per_s": 1.0, "step_seconds": 1.0, "peak_memory_gib": 1.0, "flops_per_token": 6 * parameters,
               "parameters": parameters},
        settings={"training.steps": int(tokens)},
        data={},
    )  # fmt: skip


def simulated(law: str, sizes: int, seeds: int, error: float, rng: np.random.Generator) -> Iterator[Run]:
    for parameters in SIZES[:sizes]:
        for tokens in LENGTHS if law == SIZE_AND_DATA else [TOKENS_PER_PARAMETER * parameters]:
            for variant, more in (("standard", 1.0), ("better", GAIN)):
                for seed in range(seeds):
                    final = loss(law, parameters, tokens, more) * math.exp(rng.normal(0, error))
                    yield make_run(variant, parameters, tokens, seed, final)


def holds(found: Interval | None, truth: float) -> bool | None:
    """None where there is no interval."""
    if found is None or found.low is None or found.high is None:
        return None
    return found.low < truth < found.high


def coverage(law: str, sizes: int, seeds: int, args: argparse.Namespace) -> str:
    rng = np.random.default_rng(args.seed)
    hits: dict[str, list[bool | None]] = {}
    exponent, power = EXPONENT[law]
    for _ in range(args.ladders):
        families = make_families(list(simulated(law, sizes, seeds, args.error, rng)), [])
        result = scale(families, READ, args.draws)
        assert result is not None
        assert result.law == law
        for ladder in result.ladders:
            hits.setdefault("E", []).append(holds(ladder.constants["E"], IRREDUCIBLE))
            hits.setdefault(exponent, []).append(holds(ladder.constants[exponent], power))
            for gain in ladder.gains:
                hits.setdefault(f"gain at {gain.size}", []).append(holds(gain.gain, GAIN))
    known = {name: [hit for hit in found if hit is not None] for name, found in hits.items()}
    shares = [f"{name} {np.mean(found):.0%}" for name, found in known.items() if found]
    return ", ".join(shares) or "no intervals"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladders", type=int, default=40, help="simulated for each plan (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=80, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--error", type=float, default=5e-4, help="of a run's loss, relative (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for law, sizes, seeds in PLANS:
        lengths = f" × {len(LENGTHS)} lengths" if law == SIZE_AND_DATA else ""
        found = coverage(law, sizes, seeds, args)
        print(f"{law}, {sizes} sizes{lengths}, seeds {seeds}: {found}", flush=True)


if __name__ == "__main__":
    main()
