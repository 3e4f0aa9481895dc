"""A real Slurm on this machine: a controller and two node daemons on loopback, in a folder of their own."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from launch.slurm import job_states

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 600
"""Seconds after which a job counts as hung."""

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo", "setpriv")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobRequeue=1
FirstJobId={first_job}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=ALL Default=YES
"""


class CannotStart(Exception):
    """Why there is no Slurm here."""


class Cluster:
    """Two nodes, n1 and n2, with one CPU each. Its commands find it through SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Raises ``CannotStart``."""
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise CannotStart(f"not installed: {', '.join(missing)} (Debian's slurm-wlm and munge)")
        # The sbatch script's port for a job is 10000 + its id: begin where nothing listens, and no other test does.
        port = free_ports(1, range(10_001 + os.getpid() % 19_000, 30_000))[0]
        self.configuration.write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname(),
                user=getpass.getuser(),
                ports=free_ports(3),
                first_job=port - 10_000,
            )
        )
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        paths = {"key-file": key, "socket": self.folder / "munge.socket", "pid-file": self.folder / "munge.pid"}
        paths["seed-file"] = self.folder / "munge.seed"
        # --force: pytest's folders are closed to other users, which munged would refuse.
        self._daemon("munged", "--foreground", "--force", *(f"--{option}={path}" for option, path in paths.items()))
        wait_until(lambda: (self.folder / "munge.socket").exists(), 10)
        self._daemon("slurmctld", "-D", "-f", str(self.configuration))
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-f", str(self.configuration), "-N", node, name=f"slurmd-{node}")
        wait_until(lambda: self._dead() or self._idle(), 30)
        if self._dead() or not self._idle():
            said = {log.stem: log.read_text(errors="replace").splitlines()[-1:] for log in self.folder.glob("*.log")}
            raise CannotStart("; ".join(f"{name}: {line}" for name, lines in said.items() for line in lines))

    def stop(self) -> None:
        if self.daemons[1:]:
            self.command("scancel", f"--user={getpass.getuser()}")
            wait_until(lambda: self._dead() or self.command("squeue", "-h") == "", 40)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def command(self, *words: str) -> str:
        """The output of one of Slurm's commands; empty where it fails."""
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=60)
        return "" if done.returncode else done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """This process's, without what an outer Slurm job may have left in it."""
        outer = ("SLURM", "SBATCH", "SQUEUE", "SINFO")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        return {**clean, "SLURM_CONF": str(self.configuration)}

    def _daemon(self, *words: str, name: str = "") -> None:
        # The daemons end when this process does, however it ends.
        command = ["setpriv", "--pdeathsig", "TERM", *words]
        with open(self.folder / f"{name or words[0]}.log", "wb") as log:
            self.daemons.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment))

    def _dead(self) -> bool:
        return any(daemon.poll() is not None for daemon in self.daemons)

    def _idle(self) -> bool:
        return self.command("sinfo", "--noheader", "--format=%T %D") == "idle 2\n"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def free_ports(number: int, among: range = range(1)) -> list[int]:
    """Ports of this machine that nothing listens at: any (the system's choice), or the first ones of a range."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in among if len(among) > 1 else [0] * number:
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(probe.getsockname()[1])
            if len(found) == number:
                break
        return found


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a running cluster. Skips, saying why, where Slurm is not installed or cannot be started."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    with pytest.MonkeyPatch.context() as patch:
        try:
            cluster.start()
            for name in set(os.environ) - set(cluster.environment):
                patch.delenv(name)
            patch.setenv("SLURM_CONF", str(cluster.configuration))
            yield cluster.configuration
        except CannotStart as why:
            pytest.skip(f"no Slurm here: {why}")
        finally:
            cluster.stop()


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for `apptainer exec IMAGE`, before which there is no Python: /box/python works inside of it alone, and
    the nodes' own pythons are not to be found. Returns the file in which it notes its commands."""
    box = tmp_path / "box"
    box.mkdir()
    log = box / "commands.txt"
    programs = {
        "exec": f'echo "$1 on $SLURMD_NODENAME" >> {log}\nexport INSIDE=1\nexec "$@"',
        "python": f'[[ -n ${{INSIDE:-}} ]] || exit 127\nPYTHONPATH={ROOT} exec {sys.executable} "$@"',
    }
    for name, text in programs.items():
        (box / name).write_text(f"#!/bin/bash\n{text}\n")
        (box / name).chmod(0o755)
    monkeypatch.setenv("CONTAINER", str(box / "exec"))
    monkeypatch.setenv("PYTHON", str(box / "python"))
    return log


def wait_for_job(what: Callable[[], bool], job: str, folder: Path) -> None:
    """Wait until ``what`` is true; fails when the job ends without it, or hangs."""

    def said() -> str:
        return "\n".join(file.read_text()[-3000:] for file in folder.rglob("slurm-*.out"))

    deadline = time.monotonic() + TIMEOUT
    while True:
        state = job_states([job])[job]
        if what():
            return
        assert state not in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"), f"{state}: {said()}"
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
