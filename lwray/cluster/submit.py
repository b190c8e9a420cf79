"""`lwray submit`: the command of a run as a job of a Ray cluster, of Slurm or of Kubernetes; shown, and handed over."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lwray.cluster.storage import PROBING, named_storage
from lwray.config import Resolved, load
from lwray.errors import UserError
from lwray.store import open_store
from lwray.store.objects import ObjectStore
from lwray.tracking.storage import Storage


@dataclass(frozen=True, slots=True)
class Wanted:
    """What stands on the command line of `lwray submit`, of any kind of cluster."""

    config: Path
    overrides: Sequence[str] = ()
    site: Path | None = None
    storage: str | None = None

    def load(self) -> Resolved:
        """Raises UserError for what `lwray train` would refuse to read."""
        return load(self.config, self.overrides, self.site)

    def arguments(self, root: Path | None = None) -> list[str]:
        """Of `lwray train`; files are named as seen from `root`. Raises UserError for files outside it."""
        words = [seen_from(self.config, root), *self.overrides]
        words += ["--on", seen_from(self.site, root)] if self.site else []
        return words + (["--storage", self.storage] if self.storage else [])


@dataclass(frozen=True, slots=True)
class RayJob:
    """What a Ray cluster is sent."""

    submission_id: str
    entrypoint: str
    runtime_env: dict[str, Any]

    def text(self) -> str:
        """For people, as YAML."""
        shown = {"submission_id": self.submission_id, "entrypoint": self.entrypoint, "runtime_env": self.runtime_env}
        return as_yaml(shown)


def to_ray(
    wanted: Wanted, runtime_env: Path, address: str | None, *, send: bool, show: Callable[[str], None]
) -> RayJob:
    """Show the job, and with `send` submit it. Raises UserError before anything is sent."""
    config = wanted.load().config
    wanted = replace(wanted, storage=named_storage(wanted.storage, config, joins_cluster=True))
    environment = read_runtime_env(runtime_env)
    entrypoint = train_command(wanted, working_dir(environment))
    attempt = next_attempt(str(wanted.storage), config.run.name)
    if not send:
        job = RayJob(f"{config.run.name}-{attempt or 1}", entrypoint, environment)
        show(job.text())
        return job
    from lwray.cluster.ray_jobs import RayJobs

    jobs = RayJobs(address)
    if running := jobs.alive(config.run.name):
        raise UserError(
            f"The run {config.run.name} has the job {running.submission_id} ({running.status}) on {jobs.address}. Stop "
            f"it first: lwray stop {config.run.name} --address {jobs.address}"
        )
    number = free_number(attempt, jobs.of_run(config.run.name))
    job = RayJob(f"{config.run.name}-{number}", entrypoint, environment)
    show(job.text())
    jobs.submit(job.submission_id, job.entrypoint, job.runtime_env)
    return job


def to_slurm(wanted: Wanted, script: Path, *, send: bool, show: Callable[[str], None]) -> str:
    """Show what `script` gives to sbatch, and with `send` run it; returns Slurm's id of the job. Raises UserError."""
    name = wanted.load().config.run.name
    if not script.exists():
        raise UserError(f"There is no {script} here. {AT_THE_ROOT} the script with --script.")
    if wanted.storage:
        raise UserError(f"Slurm's jobs take their storage from STORAGE in {script.parent / 'site.sh'}: set it there.")
    # the name is given, because a script reads no run file; it makes the jobs of a run follow each other
    command = ["bash", str(script), *wanted.arguments(), f"run.name={name}"]
    show(run_program(command, SHELL, PRINT="1").strip())
    if not send:
        return ""
    find_program("sbatch", "a login node of the cluster has it")
    return run_program(command, SHELL).strip()


def train_command(wanted: Wanted, root: Path | None, *more: str) -> str:
    """What the cluster runs."""
    return shlex.join(["python", "-m", "lwray", "train", *wanted.arguments(root), *more])


def as_yaml(*documents: Any) -> str:
    """For people and for kubectl, in the order that they have."""
    return str(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=1000))


SHELL = "the scripts of cluster/slurm need it"
AT_THE_ROOT = "Run this in the root of your copy of lwray's repository, or name"


def read_runtime_env(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that is not there, or is none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no {path} here. {AT_THE_ROOT} another file with --runtime-env.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is no runtime environment: it has no fields such as working_dir and env_vars.")
    return content


def working_dir(runtime_env: dict[str, Any]) -> Path | None:
    """The directory that is sent, if it is one of this machine."""
    named = str(runtime_env.get("working_dir", ""))
    return Path(named).resolve() if named and "://" not in named and not named.endswith(".zip") else None


def seen_from(file: Path, root: Path | None) -> str:
    """Raises UserError for a file that would not be sent."""
    if root is None:
        return str(file)
    if not file.resolve().is_relative_to(root):
        raise UserError(f"{file} lies outside {root}, and only that directory is there for the job: put it into it.")
    return str(file.resolve().relative_to(root))


def next_attempt(storage: str, run: str) -> int | None:
    """The number that the next start of a run will have; None where its storage cannot be seen from here."""
    place = Storage.at(storage).run(run).attempts_place
    if "://" not in storage and not Path(storage).expanduser().is_dir():
        return None
    try:
        names = (ObjectStore(place, PROBING) if "://" in place else open_store(place)).names()
    except OSError:
        return None
    return 1 + max((int(name) for name in names if name.isdecimal()), default=0)


def free_number(attempt: int | None, used: Collection[int]) -> int:
    """The attempt's own number where it is known: a start that came to no attempt may have used it up."""
    number = max(used, default=0) + 1 if attempt is None else attempt
    while number in used:
        number += 1
    return number


def find_program(name: str, where: str) -> None:
    """Raises UserError where it is not installed."""
    if shutil.which(name) is None:
        raise UserError(f"{name} is not installed here; {where}. With --print the job is only shown.")


def run_program(command: Sequence[str], where: str, text: str | None = None, **environment: str) -> str:
    """What it prints. Raises UserError where it is not installed, or fails."""
    find_program(command[0], where)
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
        raise UserError(f"{shlex.join(command[:2])} fails: {said}")
    return done.stdout
