"""On a real Slurm: a preempted job saves and is requeued, a fleet grows back, what is cancelled ends."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_ranks import losses_of, rows_of
from ray_cluster import REPOSITORY, wait_for
from slurm_daemons import GRACE_S, LACKING, Slurm, slurm_daemons

from lwray.cli import main
from lwray.errors import ExitCode
from lwray.tracking.journal import merged_ledger, merged_metrics
from lwray.tracking.rundir import RunDir, read_json

pytestmark = pytest.mark.skipif(
    bool(LACKING), reason=f"no {' and no '.join(LACKING)}: Debian's packages slurm-wlm and munge have them"
)

# so long that there is time for nodes to come and go, and no longer
PACE = [{"point": "step.data", "do": "delay", "seconds": 0.4, "step": step} for step in range(250)]
KEYS = ("tracking.enabled=false", "eval.baseline=false", "checkpoint.every_steps=20")
SITE = """
STORAGE={root}
MEETING={root}/meeting
SCRATCH={scratch}
OUTPUT={root}/%x.txt
setup() {{
    export PATH={bin}:$PATH OMP_NUM_THREADS=1
}}
GPUS=0
TIME=30
HEAD_TIME=30
HEAD_CPUS=1
HEAD_MEM=0
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_daemons() as daemons:
        yield daemons


class Site:
    """A copy of cluster/slurm with a site.sh of its own, and a storage beside it."""

    def __init__(self, slurm: Slurm, root: Path) -> None:
        self.slurm, self.root = slurm, root
        self.scripts = Path(shutil.copytree(REPOSITORY / "cluster" / "slurm", root / "slurm"))
        self.config = root / "paced.toml"
        self.config.write_text(
            (REPOSITORY / "configs" / "invariance.toml").read_text() + f"\n[env]\nLWRAY_FAULTS = '{json.dumps(PACE)}'\n"
        )

    def set(self, *lines: str) -> None:
        text = SITE.format(root=self.root, scratch=self.slurm.root, bin=Path(sys.executable).parent)
        with (self.scripts / "site.sh").open("a") as file:
            file.write(text + "\n".join(lines) + "\n")

    def start(self, script: str, *keys: str) -> list[int]:
        """The numbers of the jobs that a script submits."""
        printed = self.slurm.command("bash", str(self.scripts / script), str(self.config), *keys, *KEYS)
        return [int(line) for line in printed.split()]

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.root.glob("*.txt")))


@pytest.fixture
def site(slurm: Slurm, tmp_path: Path) -> Iterator[Site]:
    made = Site(slurm, tmp_path)
    try:
        yield made
    finally:
        print(made.output())
        slurm.cancel_all()


def step_of(run: RunDir) -> int:
    return max((line["step"] for line in merged_metrics(run)), default=-1)


def groups(run: RunDir) -> list[int]:
    """The sizes of the groups of workers so far."""
    return [event["workers"] for event in merged_ledger(run) if event["event"] == "group"]


def progress(run: RunDir, *sizes: int) -> None:
    """Wait until there were groups of these sizes, and the last of them has done some steps."""
    wait_for(lambda: groups(run) == list(sizes), 200, f"groups of {sizes}")
    goal = step_of(run) + 10
    wait_for(lambda: step_of(run) >= goal, 60, f"step {goal}")


def assert_the_run_of(site: Site, name: str, *keys: str) -> None:
    """The losses and the rows are those of a run that nothing disturbed."""
    options = [f"--storage={site.root}", "run.name=whole", "--launcher=inline"]
    config = str(REPOSITORY / "configs" / "invariance.toml")
    assert main(["train", config, *options, *KEYS, *keys]) == ExitCode.FINISHED
    assert rows_of(site.root, name) == rows_of(site.root, "whole")
    pairs = zip(losses_of(site.root, "whole"), losses_of(site.root, name), strict=True)
    assert max(abs(a - b) / abs(a) for a, b in pairs) <= 1e-5


def urgent(slurm: Slurm) -> int:
    """A job that needs all nodes at once, as a whole."""
    options = ("--partition=urgent", "--nodes=3", "--exclusive", "--time=1", "--output=/dev/null")
    return slurm.submit(*options, "--wrap=true")


def say(slurm: Slurm, root: Path, code: str, *options: str) -> str:
    """What a line of Python prints in a job of its own."""
    output = root / "said.txt"
    output.unlink(missing_ok=True)
    command = f"cd {REPOSITORY} && {sys.executable} -c {shlex.quote(code)}"
    job = slurm.submit(*options, "--time=5", f"--output={output}", "--wrap", command)
    wait_for(lambda: slurm.state(job) == "COMPLETED", 30, "the job's end")
    return output.read_text().strip()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_preempted_job_saves_inside_its_grace_is_requeued_and_stays_the_run(site: Site) -> None:
    run, steps = RunDir(site.root / "paced"), "train.steps=90"
    site.set("NODES=2", "CPUS=1")
    [job] = site.start("train.sbatch", steps, "parallel.workers=2", "parallel.cpus_per_worker=1")
    progress(run, 2)
    urgent(site.slurm)
    wait_for(lambda: site.slurm.job(job)["PreemptTime"] != "None", 30, "the preemption")
    wait_for(lambda: site.slurm.job(job)["Restarts"] == "1", GRACE_S + 40, "the requeue")
    stopped = read_json(run.summary)
    assert stopped["cause"] == "preempted"
    wait_for(lambda: site.slurm.state(job) == "COMPLETED", 200, "the run's end")
    events = merged_ledger(run)
    [notice] = [event for event in events if event["event"] == "notice"]
    [end] = [event for event in events if event["event"] == "stopped"]
    [resumed] = [event for event in events if event["event"] == "resumed"]
    assert notice["time"] < end["time"] < notice["deadline"] <= notice["time"] + GRACE_S + 1
    assert resumed["from_step"] == stopped["step"] == end["step"], "no step was lost"
    assert_the_run_of(site, "paced", steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fleet_goes_on_without_a_preempted_node_grows_back_and_leaves_nothing_behind(site: Site) -> None:
    run, steps = RunDir(site.root / "paced"), "train.steps=700"
    site.set("NODES=2", "CPUS=3")
    elastic = ("parallel.workers=[1,2]", "parallel.cpus_per_worker=2", "cluster.wait_s=150")
    head, first, second = site.start("fleet.sh", steps, *elastic)
    progress(run, 2)
    node = site.slurm.job(second)["NodeList"]
    options = ("--partition=urgent", f"--nodelist={node}", "--cpus-per-task=3", "--time=1", "--output=/dev/null")
    site.slurm.submit(*options, "--wrap=true")
    progress(run, 2, 1)
    progress(run, 2, 1, 2)
    jobs = [site.slurm.job(number) for number in (first, second)]
    assert [job["Restarts"] for job in jobs] == ["0", "1"]
    wait_for(lambda: site.slurm.state(head) == "COMPLETED", 200, "the run's end")
    wait_for(lambda: not site.slurm.command("squeue", "--noheader"), 60, "the end of the fleet")
    events = [event["event"] for event in merged_ledger(run)]
    assert (events.count("drain"), events.count("lost")) == (1, 0)
    assert_the_run_of(site, "paced", steps)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cancelled_job_commits_and_stays_cancelled(site: Site) -> None:
    run = RunDir(site.root / "paced")
    site.set("NODES=1", "CPUS=1")
    [job] = site.start("train.sbatch", "train.steps=4000", "parallel.workers=1", "parallel.cpus_per_worker=1")
    progress(run, 1)
    last = step_of(run)
    site.slurm.command("scancel", str(job))
    wait_for(lambda: not site.slurm.command("squeue", "--noheader"), 40, "the end of the job")
    summary = read_json(run.summary)
    assert (summary["cause"], summary["step"] >= last) == ("TERM", True)
    with pytest.raises(AssertionError, match="another state"):
        wait_for(lambda: site.slurm.state(job) != "CANCELLED", 10, "another state")
    assert site.slurm.job(job)["Restarts"] == "0"


WARNING = """
from lwray.cluster import slurm
print(slurm.start_warning(), slurm.grace_warning(30), slurm.preemption())
"""


def test_a_job_says_at_the_start_what_its_partition_does_not_give(slurm: Slurm, tmp_path: Path) -> None:
    assert say(slurm, tmp_path, WARNING, "--partition=safe") == "None None None"
    said = say(slurm, tmp_path, WARNING, "--partition=preempt")
    assert said.startswith(f"None A save takes 30 s, and the partition preempt gives {GRACE_S} s of notice")
    assert "does not requeue" in say(slurm, tmp_path, WARNING, "--partition=gone")
    assert "submit it with --requeue" in say(slurm, tmp_path, WARNING, "--partition=preempt", "--no-requeue")


def asks_to_be_started_again(slurm: Slurm, root: Path, when: str, limit: int = 4) -> int:
    """A job that, after the command `when`, ends as one whose run has committed; its second start ends at once."""
    script = root / "job.sh"
    lines = ["#!/bin/bash", "[[ ! $SLURM_RESTART_COUNT ]] || exit 0", "trap : TERM", when, f"cd {REPOSITORY}"]
    script.write_text("\n".join([*lines, f"exec {sys.executable} -m lwray.cluster.slurm 75"]))
    options = ("--partition=preempt", "--requeue", "--open-mode=append", f"--output={root}/%j.txt", f"--time={limit}")
    return slurm.submit(*options, str(script))


def test_a_job_near_its_time_limit_goes_back_into_the_queue_and_another_does_not(slurm: Slurm, tmp_path: Path) -> None:
    near = asks_to_be_started_again(slurm, tmp_path, ":")
    far = asks_to_be_started_again(slurm, tmp_path, ":", limit=20)
    wait_for(lambda: slurm.state(near) == "COMPLETED", 50, "the second start")
    wait_for(lambda: slurm.state(far) == "FAILED", 50, "the end")
    assert slurm.job(near)["Restarts"] == "1"
    assert (slurm.job(far)["Restarts"], slurm.job(far)["ExitCode"]) == ("0", f"{int(ExitCode.PREEMPTED)}:0")


def test_a_cancelled_job_that_asks_to_be_started_again_is_not(slurm: Slurm, tmp_path: Path) -> None:
    job = asks_to_be_started_again(slurm, tmp_path, "sleep 60 & wait")
    wait_for(lambda: slurm.state(job) == "RUNNING", 30, "the start")
    time.sleep(1)
    slurm.command("scancel", str(job))
    wait_for(lambda: not slurm.command("squeue", "--noheader"), 40, "the end of the job")
    assert (slurm.state(job), slurm.job(job)["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_preempted_job_that_has_committed_stays_until_slurm_requeues_it(slurm: Slurm, tmp_path: Path) -> None:
    preempted = "until scontrol show job $SLURM_JOB_ID | grep -q PreemptTime=2; do sleep 1; done"
    job = asks_to_be_started_again(slurm, tmp_path, preempted, limit=20)
    wait_for(lambda: slurm.state(job) == "RUNNING", 30, "the start")
    urgent(slurm)
    wait_for(lambda: slurm.state(job) == "COMPLETED", GRACE_S + 100, "the second start")
    assert slurm.job(job)["Restarts"] == "1"
