"""Run folders with a checkpoint, made without training: a debug model whose weights are moved off their start."""

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

from eval.evaluate import command
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.resolve import KNOWN_NAMES, resolve
from torchtitan_ext.run_file import dump_run, load_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.checkpoints import write_file_list
from torchtitan_ext.titan.restore import build, describe

SEQ_LEN = 64

MakeRun = Callable[..., RunFolder]


def save_checkpoint(folder: RunFolder, step: int, model: DepthDecoder) -> Path:
    """What training leaves: a distributed checkpoint and the sizes of its files."""
    path = folder.checkpoint_path / f"step-{step}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)
    write_file_list(path)
    return path


def model_at(folder: RunFolder, step: int) -> DepthDecoder:
    """The run's model with its initial weights and normal numbers that depend on the step added."""
    model = build(describe(folder))
    model.init_states()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(crc32(f"{name} {step}".encode()))
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def moved_model() -> Callable[[RunFolder, int], DepthDecoder]:
    """``moved_model(folder, step)`` is the model that ``make_run`` saved there."""
    return model_at


@pytest.fixture(scope="session")
def make_run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """``make_run(name, *overrides, steps=(10,))`` makes a run folder with a checkpoint of each step."""
    base = tmp_path_factory.mktemp("made")

    def make(name: str, *overrides: str, steps: tuple[int, ...] = (10,)) -> RunFolder:
        run_file = base / f"{name}.yaml"
        run = {
            "model": {"size": "debug"},
            "data": {"path": str(dataset), "seq_len": SEQ_LEN},
            "training": {"steps": 100, "batch_tokens": 512},
            "folder": str(base / name),
        }
        run_file.write_text(yaml.safe_dump(run))
        resolved = resolve(load_run(run_file, overrides, known=KNOWN_NAMES), ranks=1)
        folder = RunFolder(base / name)
        folder.create()
        folder.write_run(dump_run(resolved.run))
        folder.write_facts(resolved.facts())
        for step in steps:
            save_checkpoint(folder, step, model_at(folder, step))
        return folder

    return make


@pytest.fixture(scope="session")
def standard(make_run: MakeRun) -> RunFolder:
    return make_run("standard", steps=(10, 20))


@pytest.fixture(scope="session")
def small_data(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text with the same tokeniser, of which a third is held out."""
    base = tmp_path_factory.mktemp("small")
    texts = [f"Document {number}: the class has {number} methods, and each returns None.\n" for number in range(60)]
    (base / "text.jsonl").write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in texts))
    command = [
        sys.executable,
        "-m",
        "torchtitan_ext.cli",
        "prep",
        str(base / "text.jsonl"),
        "--out",
        str(base / "data"),
    ]
    command += ["--tokenizer", str(dataset / "tokenizer.json"), "--heldout-fraction", "0.3"]
    subprocess.run(command, check=True)
    return base / "data"


@pytest.fixture
def depth_eval() -> Callable[..., int]:
    """``depth_eval(folder, "--step", "10")`` is ``depth eval folder --step 10``, in this process."""

    def run(*arguments: object) -> int:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command.run(parser.parse_args([str(argument) for argument in arguments]))

    return run
