"""Train several runs one after another, each in a fresh process group, importing torch once.

torchrun … many_runs.py RUN_FILE RUNS.json [strangers], where RUNS.json is {run folder: [overrides]}. Every rank forks a
process for each run, which goes through the same code as ``torchtitan_ext.train``.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from torchtitan_ext import train
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.files import write_file
from torchtitan_ext.titan import config  # noqa: F401  (imported before the fork: this is what takes the time)

# At the end of a run torchtitan's first rank waits two seconds for other machines; there are none here.
sys.modules["torchtitan.trainer"].time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)


def agreed_port(file: Path) -> str:
    """A free port that the first rank finds and the others read from ``file``."""
    if os.environ["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            write_file(file, str(probe.getsockname()[1]).encode())
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def main(run_file: str, runs: str, more: str = "") -> int:
    if more == "strangers":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.strangers import STRANGERS

        VARIANTS.update(STRANGERS)
    # The agent's store serves one process group; every run makes its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for number, (folder, overrides) in enumerate(json.loads(Path(runs).read_text()).items()):
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = agreed_port(Path(f"{runs}.port-{number}"))
            status = 1
            try:
                status = train.main(["--config-file", run_file, "--folder", folder, *overrides])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            print(f"failed: {folder}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
