"""The commands that go from here to runs elsewhere: submit, ls, logs, stop. Parse, call, print."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lwray.errors import ExitCode, UserError

RUNTIME_ENV = Path("cluster/runtime_env.yaml")
SBATCH = Path("cluster/slurm/train.sbatch")
MANIFEST = Path("cluster/kuberay/base/rayjob.yaml")
WAIT_S = 600.0
DASHBOARD = "the dashboard of a Ray cluster, http://HEAD:8265 (over RAY_API_SERVER_ADDRESS)"
RUN = "a run's directory or URL, or its name in the storage"

AddConfig = Callable[[argparse.ArgumentParser], None]


def add_commands(commands: Any, add_config: AddConfig) -> None:
    """To the parsers of `lwray`."""
    submit = commands.add_parser("submit", help="train a run on a cluster: as a job of Ray, Slurm or Kubernetes")
    add_config(submit)
    submit.add_argument("--to", choices=("ray", "slurm", "kube"), default="ray", help="by default ray")
    submit.add_argument("--print", dest="only_print", action="store_true", help="show what would be sent, and end")
    submit.add_argument("--storage", help="where runs are kept (over LWRAY_STORAGE and run.storage)")
    submit.add_argument("--address", metavar="URL", help=f"ray: {DASHBOARD}")
    submit.add_argument("--runtime-env", type=Path, default=RUNTIME_ENV, metavar="FILE", help=f"ray: {RUNTIME_ENV}")
    submit.add_argument("--script", type=Path, default=SBATCH, metavar="FILE", help=f"slurm: {SBATCH}")
    submit.add_argument(
        "--manifest", type=Path, default=MANIFEST, metavar="PATH", help=f"kube: {MANIFEST}, or an overlay's directory"
    )
    submit.add_argument("--image", help="kube: what the pods run, where the manifest does not say")
    submit.set_defaults(command=run_submit)

    listing = commands.add_parser("ls", help="the runs of the storage, and the jobs of a Ray cluster")
    listing.add_argument("--address", metavar="URL", help=f"also the jobs of a cluster: {DASHBOARD}")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(command=run_ls)

    logs = commands.add_parser("logs", help="what the ranks of a run's newest attempt wrote")
    logs.add_argument("run", help=RUN)
    logs.add_argument("--rank", type=int, metavar="N", help="of this rank alone")
    logs.add_argument("--follow", action="store_true", help="go on until the attempt has ended")
    logs.set_defaults(command=run_logs)

    stop = commands.add_parser("stop", help="ask a run to commit and end, and wait for it")
    stop.add_argument("run", help=RUN)
    stop.add_argument("--address", metavar="URL", help=f"of a run that was submitted there: {DASHBOARD}")
    stop.add_argument("--wait", type=float, default=WAIT_S, metavar="SECONDS", help=f"by default {WAIT_S:.0f}")
    stop.set_defaults(command=run_stop)


def run_submit(arguments: argparse.Namespace) -> int:
    """`lwray submit`"""
    from lwray.cluster.submit import Wanted, to_ray, to_slurm

    wanted = Wanted(arguments.config, tuple(arguments.overrides), arguments.on, arguments.storage)
    send = not arguments.only_print
    if arguments.to == "ray":
        job = to_ray(wanted, arguments.runtime_env, arguments.address, send=send, show=print)
        name, submitted = wanted.load().config.run.name, f"job {job.submission_id}"
        then = f"ray job logs --follow {job.submission_id}; lwray stop {name}"
    elif arguments.to == "slurm":
        submitted = f"Slurm job {to_slurm(wanted, arguments.script, send=send, show=print)}"
        then = "squeue --me; scancel"
    else:
        from lwray.cluster.kube import to_kube

        submitted = f"RayJob {to_kube(wanted, arguments.manifest, arguments.image, send=send, show=print)}"
        then = "kubectl get rayjobs; kubectl delete rayjob"
    if send:
        print(f"Submitted: {submitted}. ({then})")
    return ExitCode.FINISHED


def run_ls(arguments: argparse.Namespace) -> int:
    """`lwray ls`"""
    from lwray.cluster.runs import rows, storage_here

    storage = storage_here()
    runs = [asdict(row) for row in rows(storage)]
    jobs = jobs_of(arguments.address) if arguments.address else None
    if arguments.json:
        print(json.dumps({"storage": str(storage), "runs": runs, "jobs": jobs}, indent=2))
        return ExitCode.FINISHED
    print_table(
        "Runs in " + str(storage), ("name", "state", "cause", "step", "checkpoint", "age"), map(run_cells, runs)
    )
    if jobs is not None:
        print_table(f"Jobs of {arguments.address}", ("id", "status", "started", "message"), map(job_cells, jobs))
    return ExitCode.FINISHED


def run_logs(arguments: argparse.Namespace) -> int:
    """`lwray logs`"""
    from lwray.cluster.runs import log_lines
    from lwray.tracking.show import find_run

    for line in log_lines(find_run(arguments.run), arguments.rank, follow=arguments.follow):
        print(line, flush=arguments.follow)
    return ExitCode.FINISHED


def run_stop(arguments: argparse.Namespace) -> int:
    """`lwray stop`"""
    from lwray.cluster.runs import stop_run
    from lwray.tracking.show import find_run

    if arguments.address and stop_job(arguments):
        return ExitCode.FINISHED
    run = find_run(arguments.run)
    stop_run(run, arguments.wait, print)
    print(newest_commit(run))
    return ExitCode.FINISHED


def stop_job(arguments: argparse.Namespace) -> bool:
    """Whether the run had a job on the cluster, which has ended now."""
    from lwray.cluster.ray_jobs import RayJobs
    from lwray.tracking.show import find_run

    jobs, name = RayJobs(arguments.address), arguments.run.rstrip("/").rpartition("/")[2]
    job = jobs.alive(name)
    if job is None:
        print(f"{jobs.address} runs no job of {name}; looking for the run in the storage.")
        return False
    status = jobs.stop(str(job.submission_id), arguments.wait, print)
    try:
        print(newest_commit(find_run(arguments.run)))
    except UserError:
        print(f"Its storage is not seen from here; Ray says {status} of job {job.submission_id}.")
    return True


def newest_commit(run: Any) -> str:
    """What a stopped run goes on from."""
    from lwray.cluster.runs import newest_checkpoint

    found = newest_checkpoint(run)
    if found is None:
        return f"{run.root.name} has ended. No checkpoint is committed: it would start over."
    return f"{run.root.name} has ended. {found[0]} is committed: it goes on at step {found[1].step}."


def jobs_of(address: str) -> list[dict[str, Any]]:
    """The jobs of a cluster as JSON values; times are Unix seconds."""
    from lwray.cluster.ray_jobs import RayJobs

    return [
        {
            "id": job.submission_id,
            "status": str(job.status),
            "started": job.start_time / 1000 if job.start_time else None,
            "ended": job.end_time / 1000 if job.end_time else None,
            "message": job.message,
        }
        for job in RayJobs(address).all()
    ]


def run_cells(row: dict[str, Any]) -> tuple[str, ...]:
    from lwray.tracking.show import span

    step = f"{row['step']} of {row['steps']}" if row["steps"] else str(row["step"])
    age = span(row["committed"], time.time())
    return row["name"], row["state"], row["cause"] or "", step, row["checkpoint"] or "", age


def job_cells(job: dict[str, Any]) -> tuple[str, ...]:
    from lwray.tracking.show import date

    return job["id"], job["status"], date(job["started"]), job["message"] or ""


def print_table(title: str, columns: tuple[str, ...], cells: Any) -> None:
    """Print it."""
    from rich.console import Console
    from rich.text import Text

    from lwray.tracking.show import titled

    made = titled(title, *columns)
    for row in cells:
        # what a job or a run says may hold what rich takes for markup
        made.add_row(*map(Text, row))
    Console().print(made)
