"""The results of an evaluation for a reader: lines of 80 columns, a JSON file and a picture."""

import json
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.evaluate.scale import keep_to_scale
from torchtitan_ext.files import write_file

WIDTH = 80


def write(results: dict[str, Any], out: Path) -> None:
    """Write ``results`` to ``out``, and where there are losses by position a picture of them beside it."""
    write_file(out, (json.dumps(results, indent=1, ensure_ascii=False, default=str) + "\n").encode())
    if "heldout" in results:
        picture(results).savefig(out.with_suffix(".png"))


def show(results: dict[str, Any], out: Path) -> None:
    print(f"{results['run']}, step {results['step']}: {results['size']} {results['variant']}, {results['precision']}")
    for sample in results.get("samples", []):
        print(f"\n--- {sample['prompt']!r} + {sample['tokens']} tokens\n{sample['prompt']}{sample['text']}")
    if "samples" in results:
        print("---")
    if "tasks" in results:
        _show_tasks(results["tasks"])
    if "suite" in results:
        _show_suite(results["suite"])
    if "tasks_comparison" in results:
        _show_tasks_comparison(results)
    if "heldout" in results:
        _show_heldout(results)
    if "comparison" in results:
        _show_comparison(results)
    print(f"\nwritten to {out}")


def _show_tasks(tasks: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'task':<34} {'metric':<22} {'value':>10} {'± s.e.':>10}")
    for name, marks in tasks.items():
        for metric, value in marks.items():
            if isinstance(value, float) and "_stderr" not in metric:
                measure, comma, answers = metric.partition(",")  # of which of the task's ways to find an answer
                error = marks.get(f"{measure}_stderr{comma}{answers}")
                spread = f"{error:10.4f}" if isinstance(error, float) else f"{'':>10}"
                print(f"{name[:34]:<34} {metric[:22]:<22} {value:>10.4f} {spread}")


def _show_suite(suite: dict[str, Any]) -> None:
    print(f"\n{suite['name']}: centred_mean is the mean of (score - chance) / (1 - chance) over its tasks.")
    print("It cannot be compared with published numbers of that name: docs/evaluation.md.")


def _show_tasks_comparison(results: dict[str, Any]) -> None:
    baseline = results["baseline"]
    print(f"\ntasks against {baseline['run']}, step {baseline['step']}: {baseline['size']} {baseline['variant']}")
    print(f"{'task':<34} {'metric':<22} {'difference':>10} {'± s.e.':>10}")
    for name, metrics in results["tasks_comparison"].items():
        for metric, found in metrics.items():
            error = found["standard_error"]
            spread = f"{error:10.4f}" if error is not None else ""
            print(f"{name[:34]:<34} {metric[:22]:<22} {found['difference']:>+10.4f} {spread}".rstrip())
    print("s.e. is paired: over the differences of single questions, for these two models.")


def _show_heldout(results: dict[str, Any]) -> None:
    heldout, data = results["heldout"], results["data"]["path"]
    print(f"\nheld-out split of {data}: {heldout['tokens']:,} tokens in {heldout['documents']:,} documents,")
    print(
        f"{heldout['text_bytes']:,} bytes of text. Each token is scored once, in windows of {heldout['window']} tokens"
    )
    print("one behind the other; before it the model sees what the window holds before it.")
    print(f"\n  loss           {heldout['loss']:9.4f}   nats per token")
    print(f"  perplexity     {heldout['perplexity']:9.2f}")
    print(f"  bits per byte  {heldout['bits_per_byte']:9.4f}   of UTF-8 text")
    if "logged" in results:
        logged = results["logged"]
        print(f"  logged at this step in training: {logged['loss']:.6f}; on the same windows now: ", end="")
        print(f"{logged['same_windows']:.6f}")
    if "comparison" in results:
        comparison, baseline = results["comparison"], results["baseline"]
        error = comparison["standard_error"]
        spread = f" ± {error:.4f} (standard error over documents)" if error is not None else ""
        print(f"\nagainst {baseline['run']}, step {baseline['step']}: {baseline['size']} {baseline['variant']}")
        print(f"  its loss       {results['baseline_heldout']['loss']:9.4f}")
        print(f"  difference     {comparison['difference']:+9.4f}{spread}")
        print(f"  lower loss on  {comparison['better']:9.1%}   of the tokens")
        print("  This is the uncertainty of this text; that of another seed is not in it.")
    _show_bins("tokens seen before", results["by_context"])
    _show_bins("tokens before it in its document", results["by_document_position"])


def _show_bins(title: str, bins: list[dict[str, Any]]) -> None:
    compared = bins[0]["difference"] is not None
    print(f"\n{title:<34} {'tokens':>12} {'loss':>9}" + (f" {'difference':>11}" if compared else ""))
    for row in bins:
        line = f"{_label(row):<34} {row['tokens']:>12,} {row['loss']:>9.4f}"
        print(line + (f" {row['difference']:>+11.4f}" if compared else ""))


def _label(row: dict[str, Any]) -> str:
    return str(row["start"]) if row["start"] == row["stop"] else f"{row['start']:,} to {row['stop']:,}"


def _show_comparison(results: dict[str, Any]) -> None:
    comparison = results["comparison"]
    for side, word in (("won", "lower"), ("lost", "higher")):
        if comparison[f"places_{side}"]:
            print(f"\ntokens with a much {word} loss here than in the baseline (nats)")
            print(f"{'here':>6} {'there':>6}  what came before → the token")
        for place in comparison[f"places_{side}"]:
            start = f"{place['loss']:6.2f} {place['baseline']:6.2f}  "
            target = f" → {_plain(place['target'])[:16]}"
            print(start + _plain(place["context"])[-(WIDTH - len(start) - len(target)) :] + target)
    for side, word in (("won", "lower"), ("lost", "higher")):
        if comparison[f"pairs_{side}"]:
            print(f"\npairs of tokens: loss of the second {word} here, summed over all (nats)")
            print(f"{'sum':>9} {'times':>8}  first → second")
        for pair in comparison[f"pairs_{side}"]:
            first, second = _plain(pair["previous"])[:26], _plain(pair["target"])[:26]
            print(f"{pair['difference']:+9.1f} {pair['count']:8,}  {first} → {second}")


def _plain(text: str) -> str:
    """One line: what does not print is written as Python does."""
    return repr(text)[1:-1].replace("\\'", "'")


def picture(results: dict[str, Any]) -> Figure:
    """The loss by position, and below it the difference to the baseline where there is one."""
    compared = "comparison" in results
    figure = Figure(figsize=(10, 7 if compared else 4), dpi=100, layout="constrained")
    rows = figure.subplots(2 if compared else 1, 2, squeeze=False)
    sides = {"by_context": "tokens seen before", "by_document_position": "tokens before it in its document"}
    for column, (key, title) in enumerate(sides.items()):
        bins = results[key]
        # A bin is drawn at the middle of its positions on a logarithmic axis; none before at ½.
        at = [math.sqrt(max(row["start"], 0.5) * max(row["stop"], 0.5)) for row in bins]
        loss, tokens = [row["loss"] for row in bins], [row["tokens"] for row in bins]
        axes = rows[0][column]
        axes.plot(at, loss, marker="o", markersize=3, label=f"{results['variant']}, step {results['step']}")
        if compared:
            other = [row["loss"] - row["difference"] for row in bins]
            name = f"baseline: {results['baseline']['variant']}, step {results['baseline']['step']}"
            axes.plot(at, other, marker="o", markersize=3, linestyle="--", label=name)
            below = rows[1][column]
            below.axhline(0.0, color="black", linewidth=0.8)
            below.plot(at, [row["difference"] for row in bins], marker="o", markersize=3, color="C2")
            below.set_ylabel("difference in loss, nats per token")
            keep_to_scale(below, at, tokens, [row["difference"] for row in bins], also=[0.0])
        keep_to_scale(axes, at, tokens, loss, *([other] if compared else []))
        axes.set_ylabel("held-out loss, nats per token")
        axes.legend()
        for panel in rows[:, column]:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda at, _: "0" if at == 0.5 else f"{at:g}")
            panel.set_xlabel(title)
            panel.grid(alpha=0.3)
    return figure
