"""Note in a run's logs on what it is about to be started: ``python -m launch.machine LOG_FOLDER PROCESSES HOSTS``.

PROCESSES is the number on this host, or ``auto`` for one per GPU.
"""

import sys
from pathlib import Path

from torchtitan_ext.machines import note_machine

if __name__ == "__main__":
    logs, processes, hosts = sys.argv[1:]
    note_machine(Path(logs), processes=None if processes == "auto" else int(processes), hosts=int(hosts))
