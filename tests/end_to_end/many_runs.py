"""Train several runs one after another, each in a fresh process group, importing torch once.

torchrun … many_runs.py RUN_FILE RUNS.json, where RUNS.json is {run folder: [overrides]}. Every rank forks a process for
each run, which goes through the same code as ``torchtitan_ext.train``.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from torchtitan_ext import train
from torchtitan_ext.titan import config  # noqa: F401  (imported before the fork: this is what takes the time)

# At the end of a run torchtitan's first rank waits two seconds for other machines; there are none here.
sys.modules["torchtitan.trainer"].time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)


def main(run_file: str, runs: str) -> int:
    first_port = int(os.environ["MASTER_PORT"]) + 1
    # The agent's store serves one process group; every run makes its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for number, (folder, overrides) in enumerate(json.loads(Path(runs).read_text()).items()):
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = str(first_port + number)
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
