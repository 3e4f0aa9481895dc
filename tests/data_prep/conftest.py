"""Real text, real files and real processes for the tests of the room."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.command import add_arguments, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """79 texts of the language reference behind ``help()``, then some characters of one to four UTF-8 bytes."""
    return [*topics.values(), "naïve — 数学 — 🙂", "an <|endoftext|> written out", "e\u0301 and \u00e9"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """A folder of a Parquet and a JSON-lines file with about 1.4 MB of distinct documents each."""
    folder = tmp_path_factory.mktemp("corpus")
    copies = [f"Copy {number}.\n{text}" for number in range(6) for text in documents]
    half = len(copies) // 2
    pq.write_table(pa.table({"text": copies[:half], "id": list(range(half))}), folder / "a.parquet", row_group_size=200)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in copies[half:]))
    return folder


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """A byte-level BPE of 600 entries made with the library alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents[:20], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


class Command:
    """The command, in this process or in one of its own."""

    def here(self, *arguments: object) -> int:
        """Run it in this process; errors are raised."""
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return run(parser.parse_args(["--workers", "1", *map(str, arguments)]))

    def start(
        self, *arguments: object, environment: dict[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Start it at the head of a process group, with Ctrl-C as a shell gives it to what runs in the foreground."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (environment or {})
        command = [sys.executable, "-m", "data_prep", *map(str, arguments)]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest is in the background
        try:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def finish(self, *arguments: object) -> str:
        """Run it to its successful end; returns what it printed."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out


@pytest.fixture(scope="session")
def prep() -> Command:
    return Command()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, prep: Command, documents: list[str], tokenizer_path: Path) -> Path:
    """A finished data set folder of ``documents`` over and over, for reading only: a shard for each MiB of text."""
    folder = tmp_path_factory.mktemp("small")
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents * 5))
    options = ["--heldout-fraction", "0.2", "--shard-tokens", "40000"]
    prep.here(source, "--tokenizer", tokenizer_path, "--out", folder / "data", *options)
    return folder / "data"


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "waited for a minute"
            time.sleep(0.005)

    return wait


@pytest.fixture
def kill_later() -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes put in this list do not outlive the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
