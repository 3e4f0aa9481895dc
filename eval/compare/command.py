"""Compare finished runs with a baseline: loss, how sure, and at what price.

Reads run folders, studies, and TensorBoard event files of any torchtitan run.
Writes report.html (one file, for a phone too), report.md with pictures/ (SVG),
tables/ (CSV and LaTeX) and results.json, and prints the main table. A damaged or unfinished run is left
out, and the report says why.

LABEL=PATH names a run. Event files do not say the seed: a label or folder that
ends in seed0, seed1, ... does.

--tensorboard DIR writes the curves for TensorBoard too, one run a variant,
over tokens, FLOPs, seconds and parameters: tensorboard --logdir DIR.

example: depth compare runs/my_study --out report
example: depth compare runs/my_study --tensorboard curves
example: depth compare old-seed0=a/outputs new-seed0=b/outputs --baseline old
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_ext.errors import UserError

if TYPE_CHECKING:
    from eval.compare.page import Page


FILES = ("report.html", "report.md", "results.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUNS_OR_STUDY",
        help="[LABEL=]PATH of a run folder, a study (folder or file), TensorBoard event files, or a folder with these",
    )
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="where to write (default: comparison)")
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="label or variant to compare with (default: what the study says, or else standard)",
    )
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="new folder for curves that TensorBoard overlays (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    # Imported here: matplotlib and scipy take a while, and --help needs neither.
    from eval.compare.compare import compare
    from eval.compare.console import main_table
    from eval.compare.grouping import make_families
    from eval.compare.numbers import plural
    from eval.compare.sections import report
    from eval.compare.sources import gather
    from eval.tensorboard_curves import check_folder, write_curves

    _check_out(args.out)
    if args.tensorboard:
        check_folder(args.tensorboard)
        _check_writable(args.tensorboard.resolve().parent, f"--tensorboard {args.tensorboard}")
        if args.out.resolve().is_relative_to(args.tensorboard.resolve()):
            raise UserError(
                f"--out {args.out} lies in --tensorboard {args.tensorboard}; give the two folders of their own"
            )
    gathered = gather(args.runs)
    families = make_families(gathered.runs, gathered.left_out, args.baseline)
    results = compare(families, gathered.left_out)
    if not results.families:
        for out in results.left_out:
            print(f"left out  {out['name']}: {out['why']}", file=sys.stderr)
        raise UserError("nothing to compare: that takes two finished runs that differ in more than their seed")
    try:
        write_report(args.out, report(results), results.to_json())
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be written ({error.strerror}); choose another folder") from error
    print(main_table(results))
    print(f"\nwrote {args.out / 'report.html'}, report.md, results.json, pictures/ and tables/")
    if args.tensorboard:
        count = write_curves(results, args.tensorboard)
        print(f"wrote {plural(count, 'TensorBoard run')}; see them with: tensorboard --logdir {args.tensorboard}")
    return 0


def _check_out(folder: Path) -> None:
    """Before the work, and without making anything, so that there is no folder where there is nothing to compare."""
    from eval.compare import page_markdown, page_tables

    option = f"--out {folder}"
    _check_writable(folder, option)
    for inside in (page_markdown.FOLDER, page_tables.FOLDER):
        _check_writable(folder / inside, option)
    for name in FILES:
        if (folder / name).is_dir():
            raise UserError(f"{option}: {folder / name} is a folder; choose another one")


def _check_writable(folder: Path, option: str) -> None:
    """Raise ``UserError`` where ``folder`` could not be made or written to."""
    nearest = next(path for path in [folder, *folder.absolute().parents] if os.path.lexists(path))
    if not nearest.is_dir():
        raise UserError(f"{option}: {nearest} is a file; choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{option}: {nearest} cannot be written to; choose another folder")


def write_report(folder: Path, page: "Page", results: str) -> None:
    """Write the three files, and every picture and table of the page beside them."""
    from eval.compare import page_tables
    from eval.compare.drawing import alone
    from eval.compare.page import pictures_of, tables_of
    from eval.compare.page_html import to_html
    from eval.compare.page_markdown import FOLDER, to_markdown
    from torchtitan_ext.files import write_file

    beside = {f"{FOLDER}/{picture.file}.svg": alone(picture.svg) for picture in pictures_of(page.blocks)}
    for file, table in tables_of(page.blocks).items():
        beside[f"{page_tables.FOLDER}/{file}.csv"] = page_tables.to_csv(table)
        beside[f"{page_tables.FOLDER}/{file}.tex"] = page_tables.to_latex(table)
    whole = dict(zip(FILES, (to_html(page), to_markdown(page), results), strict=True))
    for inside in (FOLDER, page_tables.FOLDER):
        (folder / inside).mkdir(parents=True, exist_ok=True)
    for name, content in {**beside, **whole}.items():
        write_file(folder / name, content.encode())
