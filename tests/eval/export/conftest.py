"""Run folders with a checkpoint, made without training: a debug model whose weights are moved off their start."""

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

from eval.export import command, import_command
from torchtitan_ext.resolve import KNOWN_NAMES, resolve
from torchtitan_ext.run_file import dump_run, load_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.checkpoints import write_file_list
from torchtitan_ext.titan.restore import build, describe

SEQ_LEN = 64

MakeRun = Callable[..., RunFolder]
Command = Callable[..., int]


@pytest.fixture(scope="session")
def run_file(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file of the debug size."""
    path = tmp_path_factory.mktemp("files") / "debug.yaml"
    run = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": SEQ_LEN},
        "training": {"steps": 3, "batch_tokens": 512},
        "heldout": {"every": 0},
    }
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.fixture(scope="session")
def make_run(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """``make_run(name, *overrides)`` makes a run folder whose step 10 holds weights unlike those of any other name."""
    base = tmp_path_factory.mktemp("made")

    def make(name: str, *overrides: str) -> RunFolder:
        folder = RunFolder(base / name)
        settings = ["--name", name, "--folder", str(folder.path), *overrides]
        resolved = resolve(load_run(run_file, settings, known=KNOWN_NAMES), ranks=1)
        folder.create()
        folder.write_run(dump_run(resolved.run))
        folder.write_facts(resolved.facts())
        model = build(describe(folder))
        model.init_states()
        for parameter_name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(crc32(f"{name} {parameter_name}".encode()))
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        path = folder.checkpoint_path / "step-10"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)
        write_file_list(path)
        return folder

    return make


@pytest.fixture(scope="session")
def standard(make_run: MakeRun) -> RunFolder:
    return make_run("standard")


def _run(module: ModuleType, arguments: tuple[object, ...]) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    args, overrides = parser.parse_known_args([str(argument) for argument in arguments])
    args.overrides = overrides
    return module.run(args)


@pytest.fixture(scope="session")
def depth_export() -> Command:
    """``depth_export(folder, "--step", "10")`` is ``depth export folder --step 10``, in this process."""
    return lambda *arguments: _run(command, arguments)


@pytest.fixture(scope="session")
def depth_import() -> Command:
    """The same for ``depth import``."""
    return lambda *arguments: _run(import_command, arguments)


@pytest.fixture(scope="session")
def odd_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set whose vocabulary of 500 tokens is no multiple of 64."""
    base = tmp_path_factory.mktemp("odd")
    text = base / "text.txt"
    text.write_text("\n\n".join(f"{number} times {number + 1} is {number * (number + 1)}." for number in range(4000)))
    command = [sys.executable, "-m", "torchtitan_ext.cli", "prep", str(text), "--tokenizer", "bpe:500"]
    subprocess.run(
        [*command, "--document-separator", "\\n\\n", "--heldout-fraction", "0.05", "--out", str(base / "data")],
        check=True,
    )
    return base / "data"
