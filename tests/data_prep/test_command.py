"""The command line, and what needs the network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.dataset import TokenDataset
from torchtitan_ext.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def run_offline(home: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run the command where the Hub cannot be reached and its cache is ``home``."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "data_prep", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("arguments", [["fineweb-edu"], ["text.txt", "--tokenizer", "gpt2"]])
def test_without_a_network_one_line_says_what_to_do(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    source, *others = arguments
    source = str(tmp_path / source) if source.endswith(".txt") else source
    result = run_offline(tmp_path / "home", source, *others, "--out", tmp_path / "data")
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: cannot ")
    assert "check the network" in last
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "data").exists()


def test_gpt2_is_taken_from_the_cache_of_the_hub(tokenizer_path: Path, tmp_path: Path) -> None:
    """The cache holds another tokeniser under that name: what counts here is that it is looked up there."""
    revision = "0" * 40
    cache = tmp_path / "home" / "hub" / "models--gpt2"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(revision)
    (cache / "snapshots" / revision).mkdir(parents=True)
    (cache / "snapshots" / revision / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    (tmp_path / "text.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(100)))
    options = ["--document-separator", r"\n\n", "--heldout-fraction", "0.3", "--out", tmp_path / "data"]
    result = run_offline(tmp_path / "home", tmp_path / "text.txt", "--tokenizer", "gpt2", *options)
    assert result.returncode == 0, result.stderr
    dataset = TokenDataset.open(tmp_path / "data")
    assert dataset.manifest.tokenizer.kind == "gpt2"
    assert dataset.vocab_size == 600
    assert sum(split.documents for split in dataset.manifest.splits.values()) == 100
    assert dataset.fingerprint in result.stdout


def test_a_note_says_when_tokens_and_text_differ_in_bytes(
    prep, tokenizer_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"cafe\u0301 {number}" for number in range(50)))
    normalizing = tmp_path / "normalizing.json"
    normalizing.write_text(tokenizer_path.read_text().replace('"normalizer": null', '"normalizer": {"type": "NFC"}'))
    options = ["--document-separator", r"\n\n", "--heldout-fraction", "0.3"]
    prep.here(tmp_path / "text.txt", "--tokenizer", tokenizer_path, *options, "--out", tmp_path / "exact")
    assert "changes the text" not in capsys.readouterr().err
    prep.here(tmp_path / "text.txt", "--tokenizer", normalizing, *options, "--out", tmp_path / "changed")
    assert "the tokeniser changes the text: the train tokens stand for" in capsys.readouterr().err
    split = TokenDataset.open(tmp_path / "changed").manifest.splits["train"]
    # "e" and a combining accent of two bytes become "é", which has two.
    assert split.bytes - split.token_bytes == split.documents


def test_a_full_disk_is_an_error_that_can_be_put_right(
    prep, corpus: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    arguments = [corpus / "b.jsonl", "--tokenizer", tokenizer_path, "--heldout-fraction", "0.1", "--workers", "1"]
    command = [sys.executable, "-m", "data_prep", *map(str, arguments), "--out", str(tmp_path / "data")]
    # Files of at most 100 kB stand for a disk that fills up.
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command]
    result = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 2
    assert "File too large" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    prep.here(*arguments, "--out", tmp_path / "data")
    TokenDataset.open(tmp_path / "data").verify_checksums()


def test_half_a_surrogate_pair_names_the_place(prep, tokenizer_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d"}\n')
    with pytest.raises(UserError, match="not valid Unicode") as raised:
        prep.here(path, "--tokenizer", tokenizer_path, "--out", tmp_path / "data")
    assert f"{path}, line 1: " in str(raised.value)


@pytest.mark.parametrize("option", ["--config", "--revision"])
def test_options_of_the_hub_are_for_the_hub(option: str, prep, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{option} is for the source fineweb-edu only"):
        prep.here("builtin", option, "x", "--out", tmp_path / "data")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--heldout-fraction", "0"],
        ["--heldout-fraction", "1"],
        ["--heldout-fraction", "nan"],
        ["--workers", "0"],
        ["--shard-tokens", "-1"],
        ["--document-separator", ""],
    ],
)
def test_values_that_make_no_sense(arguments: list[str], prep, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        prep.here("builtin", *arguments, "--out", tmp_path / "data")
    assert raised.value.code == 2
    assert arguments[0] in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_place_that_cannot_be_written_to(prep, tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UserError, match="Not a directory"):
        prep.here(tmp_path / "text.txt", "--tokenizer", tokenizer_path, "--out", tmp_path / "text.txt" / "data")
