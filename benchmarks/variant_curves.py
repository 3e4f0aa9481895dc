"""Train variants beside the standard model for 200 steps at the 10M size on one corpus, and compare their curves.

Resumable: finished runs are left alone, an interrupted one goes on. With --docs it writes one of the two tables of
docs/variants.md: ``curves``, with a picture of every variant, or ``stability``, with several learning rates.

Any key of the run file can be set as well.

example: python benchmarks/variant_curves.py data/books --variants control_block --docs docs --training.precision bf16
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from launch.torchrun import default_processes, torchrun_command, torchrun_environment
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.errors import UserError
from torchtitan_ext.resolve import KNOWN_NAMES, resolve
from torchtitan_ext.run_file import load_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.start import check_same_run
from torchtitan_ext.titan.graphs import count_graphs

RUN_FILE = Path(__file__).resolve().parent.parent / "train_configs" / "books_10m.yaml"
LOSS, HELDOUT = "loss_metrics/global_avg_loss", "heldout/loss"
BEGIN, END = "<!-- {}: written by benchmarks/variant_curves.py -->", "<!-- end of {} -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the prepared data set's folder")
    parser.add_argument("--variants", nargs="+", default=[name for name in VARIANTS if not name.startswith("deep_")])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3], help="the first one is drawn (default: 1e-3)")
    parser.add_argument("--runs", type=Path, help="where the runs are kept (default: runs/variant_curves/<table>)")
    parser.add_argument("--docs", type=Path, help="also write a table of variants.md in this folder")
    parser.add_argument("--table", choices=["curves", "stability"], default="curves", help="which (default: curves)")
    parser.add_argument("--nproc", type=int, default=default_processes())
    args, args.overrides = parser.parse_known_args()
    args.runs = args.runs or Path("runs/variant_curves") / args.table
    names = ["standard", *(name for name in args.variants if name != "standard")]
    for lr in args.lr:
        for name in names:
            try:
                train(name, lr, args)
            except UserError as error:
                raise SystemExit(f"error: {error}") from error
    if args.docs is not None:
        write_docs(names, args)
    return 0


def folder_of(name: str, lr: float, args: argparse.Namespace) -> RunFolder:
    return RunFolder(args.runs / f"{name}-lr{lr:g}")


def train(name: str, lr: float, args: argparse.Namespace) -> None:
    folder = folder_of(name, lr, args)
    arguments = [
        *("--config-file", str(RUN_FILE), "--name", folder.path.name, "--folder", str(folder.path)),
        *("--data.path", args.data, "--model.variant", name, "--optimizer.lr", str(lr), "--training.steps", "200"),
        *args.overrides,
    ]
    status = folder.status()
    if status is not None:
        run = load_run(str(RUN_FILE), arguments[2:], known=KNOWN_NAMES)
        check_same_run(resolve(run, ranks=args.nproc), folder)
    if status is not None and status["state"] in ("finished", "diverged"):
        print(f"{folder.path.name}: {status['state']} at step {status['step']}", flush=True)
        return
    command = torchrun_command(arguments, processes=args.nproc, log_folder=folder.path / "logs")
    print(f"{folder.path.name}: training", flush=True)
    (folder.path / "logs").mkdir(parents=True, exist_ok=True)
    with open(folder.path / "logs" / "console.txt", "a") as log:
        subprocess.run(command, env=torchrun_environment(args.nproc), stdout=log, stderr=subprocess.STDOUT)
    status = folder.status() or {}
    if status.get("state") not in ("finished", "diverged"):
        raise SystemExit(f"{folder.path.name} did not finish; see {log.name}, then run the same command again")
    print(f"{folder.path.name}: {status['state']} at step {status['step']}", flush=True)


def curve(folder: RunFolder, name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[name]) for record in folder.metrics() if name in record]
    return [step for step, _ in points], [value for _, value in points]


def write_docs(names: list[str], args: argparse.Namespace) -> None:
    drawn = args.table == "curves"
    pictures = args.docs / "pictures" / "variants"
    rows = []
    standard = folder_of("standard", args.lr[0], args)
    for name in names:
        runs = [folder_of(name, lr, args) for lr in args.lr]
        if not all((run.status() or {}).get("state") in ("finished", "diverged") for run in runs):
            continue
        if drawn and name != "standard":
            pictures.mkdir(parents=True, exist_ok=True)
            draw(name, runs[0], standard).savefig(pictures / f"{name}.png", dpi=80)
        title = f"[{name}](pictures/variants/{name}.png)" if drawn and name != "standard" else name
        rows.append(
            "| " + " | ".join([title, *(cells(name, runs, standard) if drawn else []), *ends(runs, args)]) + " |"
        )
    facts = ["parameters", "FLOPs", "graphs"] if drawn else []
    columns = [f"{what}, lr {lr:g}" for lr in args.lr for what in ("held-out loss (difference)", "worst gradient norm")]
    header = ["| " + " | ".join(["variant", *facts, *columns]) + " |", "|---" * (1 + len(facts) + len(columns)) + "|"]
    table = "\n".join([*header, *rows])
    page, begin, end = args.docs / "variants.md", BEGIN.format(args.table), END.format(args.table)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}", encoding="utf-8")


def cells(name: str, runs: list[RunFolder], standard: RunFolder) -> list[str]:
    """What the variant adds: parameters, FLOPs, and how many graphs it compiles at 24 layers."""
    facts, base = runs[0].facts(), standard.facts()
    added, flops = facts["parameters"] - base["parameters"], facts["flops_per_token"] / base["flops_per_token"] - 1
    return [f"+{added:,}", f"+{flops:.2%}", str(count_graphs(VARIANTS[name], 24))]


def ends(runs: list[RunFolder], args: argparse.Namespace) -> list[str]:
    """For each learning rate, the last held-out loss and the largest gradient norm after the first tenth."""
    found = []
    for run, lr in zip(runs, args.lr, strict=True):
        steps, norms = curve(run, "grad_norm")
        worst = max((norm for step, norm in zip(steps, norms, strict=True) if step > steps[-1] / 10), default=math.nan)
        standard, state = folder_of("standard", lr, args), run.status() or {}
        if state["state"] == "finished":
            loss = last(run, HELDOUT)
            found.append(f"{loss:.3f} ({loss - last(standard, HELDOUT):+.3f})")
        else:
            found.append(f"diverged at {state['step']}")
        found.append(f"{worst:.2f}")
    return found


def last(run: RunFolder, name: str) -> float:
    return curve(run, name)[1][-1]


def draw(name: str, run: RunFolder, standard: RunFolder) -> Figure:
    """Training loss of both above, held-out difference below."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for folder, label, colour in ((standard, "standard", "0.5"), (run, name, "tab:blue")):
        upper.plot(*curve(folder, LOSS), label=f"{label}, training", color=colour, alpha=0.5, linewidth=1)
        upper.plot(*curve(folder, HELDOUT), label=f"{label}, held out", color=colour, marker="o")
    upper.set_ylabel("loss (nats per token)")
    upper.legend()
    (steps, base), (_, found) = curve(standard, HELDOUT), curve(run, HELDOUT)
    lower.axhline(0, color="0.5", linewidth=1)
    lower.plot(steps, [b - a for a, b in zip(base, found, strict=False)], marker="o")
    lower.set_ylabel("held-out difference")
    lower.set_xlabel(f"step ({run.facts()['identity']['batch_tokens']:,} tokens each)")
    figure.suptitle(f"{name} against standard: 10M size, one seed each")
    return figure


if __name__ == "__main__":
    sys.exit(main())
