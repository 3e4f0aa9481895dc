"""A preparation that is killed or interrupted, continued by the same command, in real processes."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from data_prep.dataset import TokenDataset
from data_prep.journal import LOCK
from torchtitan_ext.errors import UserError


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(folder: Path) -> list[dict]:
    journal = folder / "progress.json"
    return json.loads(journal.read_text())["splits"]["train"]["shards"] if journal.exists() else []


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def options(corpus: Path, tokenizer_path: Path) -> list:
    return [f"{corpus}/*", "--tokenizer", tokenizer_path, "--heldout-fraction", "0.05", "--shard-tokens", "100000"]


@pytest.fixture(scope="module")
def undisturbed(prep, options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "data"
    prep.finish(*options, "--workers", 3, "--out", folder)
    return folder


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_continues_to_the_same_bytes_with_another_number_of_workers(
    signal_number: signal.Signals,
    prep,
    options: list,
    undisturbed: Path,
    tmp_path: Path,
    until: Callable[[Callable[[], bool]], None],
    kill_later: list["subprocess.Popen[str]"],
) -> None:
    folder = tmp_path / "data"
    process = prep.start(*options, "--workers", 2, "--out", folder)
    kill_later.append(process)
    until(lambda: len(shards(folder)) >= 1)
    if signal_number == signal.SIGINT:
        os.killpg(process.pid, signal_number)  # Ctrl-C goes to the whole group.
    else:
        process.send_signal(signal_number)
    _, err = process.communicate(timeout=60)

    if signal_number == signal.SIGINT:
        assert process.returncode == 130
        assert "continues" in err
        assert "Traceback" not in err
    else:
        assert process.returncode == -signal_number
    until(lambda: group_is_gone(process.pid))
    with pytest.raises(UserError, match="unfinished"):
        TokenDataset.open(folder)

    done = shards(folder)
    assert len(done) < len(TokenDataset.open(undisturbed).manifest.splits["train"].shards)
    written = {shard["file"]: (folder / shard["file"]).stat().st_mtime_ns for shard in done}
    # What else a crash can leave: a shard that the journal does not list yet, and a half-written one.
    (folder / "train" / f"{len(done):05d}.safetensors").write_bytes(b"the bytes of another shard")
    (folder / "train" / f".{len(done) + 1:05d}.safetensors.tmp").write_bytes(b"half a shard")
    prep.finish(*options, "--workers", 1, "--out", folder)
    assert {name: (folder / name).stat().st_mtime_ns for name in written} == written
    assert contents(folder) == contents(undisturbed)


def test_finished_data_set_is_left_as_it_is(prep, options: list, undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    assert prep.here(*options, "--out", undisturbed) == 0
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*") if path != undisturbed} == {
        path: time for path, time in before.items() if path != undisturbed
    }


def test_killed_before_the_first_shard(prep, options: list, undisturbed: Path, tmp_path: Path) -> None:
    """Only the lock, the tokeniser's files and half a journal are there."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / "tokenizer.json").write_bytes((undisturbed / "tokenizer.json").read_bytes())
    (folder / ".progress.json.tmp").write_text("{")
    prep.here(*options, "--out", folder)
    assert contents(folder) == contents(undisturbed)


def test_only_one_process_writes_to_a_folder(
    prep,
    options: list,
    tmp_path: Path,
    until: Callable[[Callable[[], bool]], None],
    kill_later: list["subprocess.Popen[str]"],
) -> None:
    folder = tmp_path / "data"
    process = prep.start(*options, "--workers", 1, "--out", folder)
    kill_later.append(process)
    until(lambda: (folder / "progress.json").exists())
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match="another `depth prep` is writing to"):
        prep.here(*options, "--out", folder)


def test_a_file_system_without_locks_is_a_note(
    prep, options: list, undisturbed: Path, tmp_path: Path, without_locks: dict[str, str]
) -> None:
    process = prep.start(*options, "--workers", 1, "--out", tmp_path / "data", environment=without_locks)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "has no locks" in err
    assert contents(tmp_path / "data") == contents(undisturbed)


def test_ctrl_c_does_not_wait_for_the_work_at_hand(
    prep, tokenizer_path: Path, tmp_path: Path, until: Callable, kill_later: list
) -> None:
    """Each document is a word of thirty-two million letters, on which the tokeniser works for minutes."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} " + "ab" * (1 << 24)}) + "\n" for number in range(2)))
    options = ["--tokenizer", tokenizer_path, "--workers", 2, "--out", tmp_path / "data"]
    process = prep.start(path, *options)
    kill_later.append(process)
    workers = psutil.Process(process.pid)
    until(lambda: any(child.cpu_times().user > 1 for child in workers.children()))
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "Traceback" not in err
    until(lambda: group_is_gone(process.pid))


def test_refuses_to_continue_with_other_settings_and_names_them(
    prep, options: list, corpus: Path, tmp_path: Path, until: Callable, kill_later: list["subprocess.Popen[str]"]
) -> None:
    folder = tmp_path / "data"
    process = prep.start(*options, "--workers", 1, "--out", folder)
    kill_later.append(process)
    until(lambda: (folder / "progress.json").exists())
    process.kill()
    process.communicate()
    journal = (folder / "progress.json").read_bytes()
    source, others = options[0], options[1:]
    for changed, named in (
        ([source, *others, "--heldout-fraction", "0.06"], "--heldout-fraction 0.05, not 0.06"),
        ([source, *others, "--shard-tokens", "7"], "--shard-tokens 100000, not 7"),
        ([source, *others, "--tokenizer", "bpe:300"], "--tokenizer 'file with SHA-256"),
        ([corpus / "b.jsonl", *others], "source files 2, not 1"),
    ):
        with pytest.raises(UserError, match="was begun with") as raised:
            prep.here(*changed, "--out", folder)
        assert named in str(raised.value)
    assert (folder / "progress.json").read_bytes() == journal
