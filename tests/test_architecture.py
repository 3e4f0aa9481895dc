"""Who may import whom (docs/design.md), read off the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ROOMS = {
    "torchtitan_ext/errors.py": set(),
    "torchtitan_ext/files.py": set(),
    "torchtitan_ext/sizes.py": {"torchtitan_ext.errors"},
    "torchtitan_ext/recipe.py": {"torchtitan_ext.errors", "torchtitan_ext.sizes"},
    "torchtitan_ext/resumption.py": {
        "torchtitan_ext.older",
        "torchtitan_ext.resolve",
        "torchtitan_ext.run_file",
        "torchtitan_ext.run_folder",
    },
    "torchtitan_ext/older.py": {"torchtitan_ext.errors"},
    "torchtitan_ext/run_folder.py": {"torchtitan_ext.errors", "torchtitan_ext.files", "torchtitan_ext.older"},
    "torchtitan_ext/pruned.py": {"torchtitan_ext.errors", "torchtitan_ext.files", "torchtitan_ext.run_folder"},
    "torchtitan_ext/run_lock.py": {"torchtitan_ext.errors"},
    "torchtitan_ext/agreement.py": {"torchtitan_ext.errors"},
    "torchtitan_ext/follow.py": set(),
    "torchtitan_ext/orphans.py": set(),
    "torchtitan_ext/units.py": set(),
    "torchtitan_ext/shipped.py": set(),
    "torchtitan_ext/machines.py": set(),
    "torchtitan_ext/gpus.py": {"torchtitan_ext.errors"},
    "torchtitan_ext/cost.py": {
        "torchtitan_ext.resolve",
        "torchtitan_ext.units",
        "data_prep",
    },
    "torchtitan_ext/parameter_groups.py": {"torchtitan_ext.errors"},
    "torchtitan_ext/run_file": {"torchtitan_ext.errors", "torchtitan_ext.parameter_groups", "torchtitan_ext.run_file"},
    "torchtitan_ext/ops": {"torchtitan_ext.ops", "torch"},
    "torchtitan_ext/depth": {
        "torchtitan_ext.errors",
        "torchtitan_ext.parameter_groups",
        "torchtitan_ext.sizes",
        "torchtitan_ext.recipe",
        "torchtitan_ext.ops",
        "torchtitan_ext.depth",
        "torch",
        # torchtitan's public building blocks
        "torchtitan.models",
        "torchtitan.protocols",
        "torchtitan_ext.titan",
    },
    "data_prep": {"torchtitan_ext.errors", "torchtitan_ext.files", "data_prep"},
    "launch": {
        "torchtitan_ext.errors",
        "torchtitan_ext.shipped",
        "torchtitan_ext.gpus",
        "torchtitan_ext.resolve",
        "torchtitan_ext.run_file",
        "torchtitan_ext.run_folder",
        "torchtitan_ext.run_lock",
        "torchtitan_ext.start",
        "torchtitan_ext.files",
        "torchtitan_ext.follow",
        "torchtitan_ext.machines",
        "torchtitan_ext.orphans",
        "torchtitan_ext.pruned",
        "torchtitan_ext.study",
        "torchtitan_ext.titan.weights_only",  # to reduce checkpoints
        "torchtitan_ext.units",
        "launch",
        "torch",  # to count GPUs
    },
    "torchtitan_ext/study": {
        "torchtitan_ext.cost",
        "torchtitan_ext.errors",
        "torchtitan_ext.gpus",
        "torchtitan_ext.files",
        "torchtitan_ext.machines",
        "torchtitan_ext.parameter_groups",
        "torchtitan_ext.units",
        "torchtitan_ext.older",
        "torchtitan_ext.run_file",
        "torchtitan_ext.run_folder",
        "torchtitan_ext.sizes",
        "torchtitan_ext.recipe",
        "torchtitan_ext.resolve",
        "torchtitan_ext.start",
        "torchtitan_ext.depth.architecture",
        "torchtitan_ext.depth.registry",
        "torchtitan_ext.depth.variant",
        "torchtitan_ext.study",
        "data_prep",
    },
    "torchtitan_ext/plan": {
        "torchtitan_ext.cost",
        "torchtitan_ext.errors",
        "torchtitan_ext.gpus",
        "torchtitan_ext.plan",
        "torchtitan_ext.resolve",
        "torchtitan_ext.run_file",
        "torchtitan_ext.units",
        "torchtitan_ext.depth.registry",
        "torchtitan_ext.titan.rehearsal",
        "data_prep",
        "torch",
    },
    "torchtitan_ext/bench": {
        "torchtitan_ext.errors",
        "torchtitan_ext.files",
        "torchtitan_ext.orphans",
        "torchtitan_ext.resolve",
        "torchtitan_ext.run_file",
        "torchtitan_ext.ops",
        "torchtitan_ext.titan",
        "torchtitan_ext.bench",
        "data_prep",
        "torch",
    },
    "eval/compare": {
        "torchtitan_ext.errors",
        "torchtitan_ext.files",
        "torchtitan_ext.machines",
        "torchtitan_ext.run_folder",
        "torchtitan_ext.study",
        "data_prep.manifest",
        "eval.compare",
        "eval.scaling",
        "eval.tensorboard_curves",
    },
    "eval/evaluate": {
        "torchtitan_ext.errors",
        "torchtitan_ext.files",
        "torchtitan_ext.run_folder",
        "torchtitan_ext.depth.decoder",
        "torchtitan_ext.titan.restore",
        "torchtitan_ext.titan.loader",
        "data_prep",
        "eval.evaluate",
        "torch",
        "torchtitan.models",
    },
}
OURS = ("torchtitan_ext", "data_prep", "launch", "eval", "torch", "torchtitan")


def imports(path: Path) -> set[str]:
    """The modules of ours, torch's and torchtitan's that ``path`` imports anywhere, by their absolute names."""
    package = list(path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{module}.{alias.name}" for alias in node.names} if module in OURS else {module}
            found |= names
    return {name for name in found if name.split(".")[0] in OURS}


def files(room: str) -> list[Path]:
    path = ROOT / room
    return [path] if path.suffix else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert files(room)
    for path in files(room):
        for name in imports(path):
            allowed = any(name == module or name.startswith(f"{module}.") for module in ROOMS[room])
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_only_titan_touches_torchtitans_insides() -> None:
    """All of torchtitan but its model building blocks is for ``titan`` alone (the entry starts the logger too)."""
    for path in sorted((ROOT / "torchtitan_ext").rglob("*.py")) + files("launch"):
        where = path.relative_to(ROOT)
        if where.parts[1] == "titan" or where.name == "train.py":
            continue
        for name in imports(path):
            if name.split(".")[0] == "torchtitan":
                assert name.startswith(("torchtitan.models", "torchtitan.protocols")), f"{where} imports {name}"


def test_evaluation_does_not_know_the_launcher() -> None:
    for path in files("eval"):
        assert not any(name.startswith("launch") for name in imports(path)), path


def test_training_does_not_know_the_launcher() -> None:
    for path in sorted((ROOT / "torchtitan_ext").rglob("*.py")):
        assert not any(name.startswith("launch") for name in imports(path)), path
