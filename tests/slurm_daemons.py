"""A real Slurm of several nodes on loopback: its own munged, controller and node daemons, all in one directory."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from ray_cluster import free_port, wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
SEARCHED = f"{os.environ['PATH']}:/usr/sbin:/sbin"
"""Daemons are not on every user's path."""
GRACE_S = 20
LACKING = [name for name in DAEMONS if shutil.which(name, path=SEARCHED) is None]
"""Why tests that need Slurm are skipped: Debian's packages slurm-wlm and munge have these."""

CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=100000
JobRequeue=1
ReturnToService=2
KillWait=5
MinJobAge=600
InactiveLimit=0
"""
PARTITIONS = """\
PartitionName=safe    Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
PartitionName=preempt Nodes=ALL PriorityTier=1  PreemptMode=REQUEUE GraceTime={grace} MaxTime=60 Default=YES State=UP
PartitionName=gone    Nodes=ALL PriorityTier=1  PreemptMode=CANCEL GraceTime={grace} MaxTime=60 State=UP
PartitionName=urgent  Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """Its nodes, and the environment in which Slurm's commands find it."""

    root: Path
    nodes: tuple[str, ...]
    environment: dict[str, str]

    def command(self, *words: str, **more: str) -> str:
        """What a command of Slurm prints; `more` is added to its environment."""
        environment = self.environment | more
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str, **more: str) -> int:
        """`sbatch`; the job's number."""
        return int(self.command("sbatch", "--parsable", *words, **more).split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of it, by field."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "show", "job", "-o", str(number))))

    def state(self, number: int) -> str:
        """RUNNING, PENDING, …"""
        return self.job(number)["JobState"]

    def cancel_all(self) -> None:
        """No job is left, pending or running."""
        self.command("scancel", "--state=PENDING")
        self.command("scancel", "--state=RUNNING")
        wait_for(lambda: not self.command("squeue", "--noheader"), 30, "an empty queue")


@contextmanager
def slurm_daemons(nodes: int = 3, cpus: int = 4) -> Iterator[Slurm]:
    """munged, slurmctld and a slurmd for each node, with partitions safe, preempt, gone and urgent."""
    # a short path: unix sockets lie in it
    root = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    # slurmctld and munged refuse what others could write to
    root.chmod(0o755)
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_", "LWRAY_"))},
        "SLURM_CONF": str(root / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{SEARCHED}",
    }
    slurm = Slurm(root, names, environment)
    write_configuration(root, names, cpus)
    with ExitStack() as daemons:
        daemons.callback(shutil.rmtree, root, ignore_errors=True)
        daemons.enter_context(daemon(slurm, "munged", "--foreground", "--force", *munge_options(root)))
        wait_for((root / "munge.socket").exists, 10, "munged")
        daemons.enter_context(daemon(slurm, "slurmctld", "-D", "-i"))
        for name in names:
            daemons.enter_context(daemon(slurm, "slurmd", "-D", "-N", name))
        idle = f"{nodes}"
        wait_for(lambda: slurm.command("sinfo", "-h", "-p", "safe", "-t", "idle", "-o", "%D") == idle, 30, "the nodes")
        yield slurm


def write_configuration(root: Path, names: tuple[str, ...], cpus: int) -> None:
    """slurm.conf and munge's key."""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    host = socket.gethostname().split(".")[0]
    lines = [CONFIGURATION.format(host=host, port=free_port(), user=user, root=root)]
    for name in names:
        address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
        lines.append(f"NodeName={name} {address} CPUs={cpus} RealMemory=2000 State=UNKNOWN\n")
    (root / "slurm.conf").write_text("".join(lines) + PARTITIONS.format(grace=GRACE_S))
    key = root / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)


def munge_options(root: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={root}/munge.{suffix}" for option, suffix in files.items()]


@contextmanager
def daemon(slurm: Slurm, name: str, *options: str) -> Iterator[None]:
    """A daemon in the foreground of its own session; it and what descends from it are ended by their ids."""
    program = shutil.which(name, path=SEARCHED)
    assert program is not None
    with (slurm.root / f"{name}.{options[-1].strip('-')[-2:]}.out").open("w") as log:
        process = subprocess.Popen(
            [program, *options], env=slurm.environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
