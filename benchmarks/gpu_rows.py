"""Part of gpu.sh: check that what pyproject.toml asks for is installed, and turn a benchmark into lines of the table.

example: python benchmarks/gpu_rows.py runs/gpu-2026-01-31-120000
"""

import argparse
import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

GOALS = {"control_block": (0.95, 1.05), "block_hybrid_memory": (0.92, 1.10)}
"""Of standard: tokens/s at least, memory at most."""
MFU = 0.45


def missing() -> list[str]:
    """The requirements of pyproject.toml that are not met, each with what is there instead."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging (not installed)"]
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    tests = [text for text in project["optional-dependencies"]["test"] if Requirement(text).name == "pytest"]
    for requirement in map(Requirement, [*project["dependencies"], *tests]):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version == "not installed" or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier} ({version})")
    return found


def lines(models: list[dict[str, Any]], size: str, device: str) -> list[str]:
    """Lines of Markdown: what, goal, found. The first model is standard."""
    by_label = {model["label"]: model for model in models}
    what = f"{device}, {size}, bf16, compile: "
    found = []
    for label, (speed, memory) in GOALS.items():
        lower, median, upper = by_label[label]["speed"]["ratio"]
        measured = f"{median:.3f} (quartiles {lower:.3f}-{upper:.3f}) and {by_label[label]['peak_ratio']:.3f}"
        found.append(
            f"| {what}`{label}` tokens/s and memory / `standard` | ≥ {speed:.2f} and ≤ {memory:.2f} | {measured} |"
        )
    return [*found, f"| {what}`standard`, MFU | ≥ {MFU} | {models[0]['speed']['mfu']:.3f} |"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder that gpu.sh writes to")
    parser.add_argument("--check", action="store_true", help="only say in one line what is missing; status 2 if any is")
    args = parser.parse_args()
    if args.check:
        lacks = missing()
        if lacks:
            print(
                f"error: {sys.executable} lacks {', '.join(lacks)}; `make test` makes an environment", file=sys.stderr
            )
        return 2 if lacks else 0
    record = json.loads((args.out / "models" / "bench.json").read_text(encoding="utf-8"))
    size, device = record["models"][0]["run"]["model"]["size"], record["machine"]["device"]
    text = "\n".join(lines(record["models"], size, device)) + "\n"
    (args.out / "rows.md").write_text(text, encoding="utf-8")
    print(f"\n{text}(saved to {args.out / 'rows.md'})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
