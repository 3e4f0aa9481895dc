"""What ``depth train`` shows when a rank fails that its console does not show."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from data_prep.dataset import TokenDataset
from data_prep.windows import WindowOrder, Windows

SEQ_LEN = 64


@pytest.mark.slow
def test_the_error_of_another_rank_than_the_first_is_shown(dataset: Path, tmp_path: Path) -> None:
    """A token outside the vocabulary, in a window that the second rank alone reads: of the first step's four samples
    it has the last two."""
    data = shutil.copytree(dataset, tmp_path / "data")
    windows = Windows(TokenDataset.open(data).split("train"), SEQ_LEN)
    window = WindowOrder(windows.n_windows, seed=0).window(3)
    (shard,) = (data / "train").iterdir()
    tokens = load_file(shard)["tokens"].copy()
    tokens[window * SEQ_LEN + 5] = np.iinfo(tokens.dtype).max
    save_file({"tokens": tokens}, shard)
    manifest = json.loads((data / "manifest.json").read_text())
    entry = manifest["splits"]["train"]["shards"][0]
    entry |= {"sha256": hashlib.sha256(shard.read_bytes()).hexdigest(), "size": shard.stat().st_size}
    (data / "manifest.json").write_text(json.dumps(manifest))

    run = {
        "model": {"size": "debug"},
        "data": {"path": str(data), "seq_len": SEQ_LEN},
        "training": {"steps": 4, "batch_tokens": 4 * SEQ_LEN, "micro_batch": 2},
        "heldout": {"every": 0},
        "folder": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "torchtitan_ext.cli", "train", str(tmp_path / "run.yaml"), "--nproc", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    shown = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("[rank1]:error: ")]
    assert len(shown) == 1, done.stdout + done.stderr
    assert f"{shard}: token {window * SEQ_LEN + 5} is 65535, outside the vocabulary of 512" in shown[0]
