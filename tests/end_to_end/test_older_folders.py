"""Run folders of the version in which a layer had one ``link``, not two connections: they are read and trained on.

``tests/older/before_connections.tar.xz`` holds a data set and, of five variants, a run folder as revision 8c1a762 left
it at step 3 of 6; ``metrics.jsonl`` goes on to step 6, which that version reached without a break. Made by::

    depth prep text.txt --document-separator '\\n\\n' --tokenizer characters --heldout-fraction 0.1 --out data
    depth train run.yaml --nproc 1 --model.variant VARIANT --folder runs/VARIANT
"""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtitan_ext.older import todays_name
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import restore
from torchtitan_ext.titan.todays_names import TodaysNames

ARCHIVE = Path(__file__).parent.parent / "older" / "before_connections.tar.xz"
VARIANTS = ["standard", "attnres_block", "m_gate_kv", "moda", "mid_skip"]
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for run in (folder / "runs").iterdir():
        run_file = run / "run.yaml"
        run_file.write_text(run_file.read_text().replace("path: data", f"path: {folder / 'data'}"))
    return folder


def stored(checkpoint: Path, into: Path) -> dict[str, Any]:
    """What a checkpoint holds, as PyTorch's own converter reads it, by the names that are in it."""
    dcp_to_torch_save(checkpoint, into)
    content: dict[str, Any] = torch.load(into, weights_only=False)
    return content


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_equal_to_the_bit(variant: str, old: Path, tmp_path: Path) -> None:
    run = RunFolder(old / "runs" / variant)
    kept = stored(run.checkpoint_path / "step-3", tmp_path / "all.pt")
    weights = restore(run).model.state_dict()
    assert {name for name in weights if name != "tok_embeddings.weight"} <= {todays_name(name) for name in kept}
    for name, value in kept.items():
        if isinstance(value, torch.Tensor) and not name.startswith("optimizer"):
            assert torch.equal(weights[todays_name(name)], value), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_optimizer_remembers_is_equal_to_the_bit(variant: str, old: Path, tmp_path: Path) -> None:
    path = old / "runs" / variant / "checkpoint" / "step-3"
    kept = stored(path, tmp_path / "all.pt")["optimizer"]
    moments = {name: value for name, value in kept.items() if name.endswith(MOMENTS)}
    assert len(moments) > 60
    today = {f"optimizer.{todays_name(name)}": torch.full_like(value, -1.0) for name, value in moments.items()}
    dcp.load(today, checkpoint_id=path, planner=TodaysNames(), no_dist=True)
    for name, value in moments.items():
        assert torch.equal(today[f"optimizer.{todays_name(name)}"], value), name


@pytest.fixture(scope="module")
def resumed(old: Path, train_many: Callable[..., dict[str, RunFolder]]) -> dict[str, RunFolder]:
    def copy(name: str, folder: Path) -> None:
        shutil.copytree(old / "runs" / name, folder)

    runs = {name: ["--model.variant", name, "--data.path", str(old / "data")] for name in VARIANTS}
    before = {name: (old / "runs" / name / "metrics.jsonl").read_text() for name in VARIANTS}
    folders = train_many(runs, ranks=1, prepare=copy, file=old / "run.yaml")
    for name, text in before.items():
        (folders[name].path / "before.jsonl").write_text(text)
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_goes_on_as_it_would_have(variant: str, resumed: dict[str, RunFolder]) -> None:
    before = [json.loads(line) for line in (resumed[variant].path / "before.jsonl").read_text().splitlines()]
    after = list(resumed[variant].metrics())
    assert [record["step"] for record in after] == [record["step"] for record in before] == [1, 2, 3, 4, 5, 6]
    assert [record["time"] for record in after][:3] == [record["time"] for record in before][:3]
    assert [record["time"] for record in after][3:] != [record["time"] for record in before][3:]
    for name in ("loss_metrics/global_avg_loss", "grad_norm"):
        assert [r[name] for r in after] == pytest.approx([r[name] for r in before], rel=1e-5), name
