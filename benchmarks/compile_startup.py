"""What a variant's graphs cost at start-up: seconds until the first compiled training step is done, against standard.

Each measurement is a process of its own with an empty compiler cache; the variant and standard take turns. The
model is narrow, so that nearly all of the time is the compiler's.

example: python benchmarks/compile_startup.py --variants control_block moda --layers 24 48
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.titan.graphs import count_graphs


def seconds(variant: str, layers: int) -> float:
    """Time of the first two compiled training steps in a fresh process, without its imports."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--measure", variant, str(layers)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=[name for name in VARIANTS if not name.startswith("deep_")])
    parser.add_argument("--layers", nargs="+", type=int, default=[24, 48])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--measure", nargs=2, metavar=("VARIANT", "LAYERS"), help="one measurement, in this process")
    args = parser.parse_args()
    if args.measure is not None:
        start = time.perf_counter()
        count_graphs(VARIANTS[args.measure[0]], int(args.measure[1]), backend="inductor")
        print(time.perf_counter() - start)
        return
    print(f"{'variant':<24} {'layers':>6} {'graphs':>6} {'start-up':>9} {'of standard':>12}")
    for layers in args.layers:
        for name in args.variants:
            pairs = [(seconds(name, layers), seconds("standard", layers)) for _ in range(args.turns)]
            ratio = statistics.median(a / b for a, b in pairs)
            spent = statistics.median(a for a, _ in pairs)
            graphs = count_graphs(VARIANTS[name], layers)
            print(f"{name:<24} {layers:>6} {graphs:>6} {spent:>7.1f} s {ratio:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
