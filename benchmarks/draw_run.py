"""Draw a run folder's curves: loss, gradient norm, learning rate and throughput over the tokens seen.

example: python benchmarks/draw_run.py runs/books_10m docs/pictures/books_10m.png
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from torchtitan_ext.run_folder import RunFolder

PANELS = [
    ("loss (nats per token)", {"training": "loss_metrics/global_avg_loss", "held out": "heldout/loss"}),
    ("gradient norm", {"before clipping": "grad_norm"}),
    ("learning rate", {"all parameters": "lr/AdamW/1"}),
    ("tokens/s, all processes", {"training time only": "throughput/global_tokens_per_s"}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    args = parser.parse_args()
    folder = RunFolder(args.run)
    records, facts = list(folder.metrics()), folder.facts()
    tokens = {record["step"]: record["progress/tokens"] for record in records if "progress/tokens" in record}
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for label, tag in curves.items():
            points = [(tokens[record["step"]] / 1e6, record[tag]) for record in records if tag in record]
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 20 else None)
        axes.set_title(title)
        axes.set_xlabel("tokens seen (millions)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{facts['name']}: {facts['variant']}, {facts['parameters'] / 1e6:.1f}M parameters")
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
