"""Runs that are kept on an object store, through the command line: machines come and go, and the store fails."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from door import Door, process_as_it_was
from engine_ranks import TOY_KEYS, losses_of, rows_of, weights_of
from faulty_proxy import Fault, faulty_proxy
from ray_cluster import ray_cluster, wait_for
from s3_server import BUCKET, ENVIRONMENT, SECRETS, ask, s3_server
from test_resume import KEYS, finish

from lwray.checkpoint.find import committed, pick, verify
from lwray.checkpoint.read import Reader
from lwray.cli import main
from lwray.cluster import preflight
from lwray.faults import VARIABLE
from lwray.store import open_store
from lwray.store.retry import Retry
from lwray.tracking import show
from lwray.tracking.journal import merged_ledger, read_lines
from lwray.tracking.rundir import RunDir
from lwray.tracking.storage import Storage, pull_run

STEPS = 200
INLINE = ("--launcher=inline", *KEYS, f"train.steps={STEPS}", "checkpoint.every_steps=20", "checkpoint.keep=1000")
QUICKLY = (*INLINE, "cluster.lease_s=1")
NUMBERS = count(1)
SLOW = {"point": "step.data", "do": "delay", "seconds": 0.02}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            patch.setenv(name, value)
        yield endpoint


@dataclass(frozen=True)
class Machine:
    """A spool of its own, and the endpoint that this machine reaches the store by."""

    spool: Path
    endpoint: str
    url: str
    more: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | self.more | {"LWRAY_SPOOL": str(self.spool), "AWS_ENDPOINT_URL": self.endpoint}

    def run(self, name: str) -> RunDir:
        """The run as this machine's spool tells it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LWRAY_SPOOL", str(self.spool))
            return Storage.at(self.url).run(name)

    def brought(self, name: str) -> RunDir:
        """The run as the storage tells it."""
        run = self.run(name)
        assert pull_run(run, ids=True)
        return run

    def start(self, name: str, *options: str) -> subprocess.Popen[str]:
        """A run whose steps take long enough for saves between them."""
        self.spool.mkdir(parents=True, exist_ok=True)
        file = self.spool / "toy.toml"
        file.touch()
        command = [sys.executable, "-m", "lwray", "train", str(file), f"--storage={self.url}", f"run.name={name}"]
        return subprocess.Popen(
            [*command, *options],
            env=self.environment | {VARIABLE: json.dumps([SLOW])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def lwray(self, *arguments: str) -> int:
        """A command in this process."""
        with process_as_it_was():
            os.environ.update(self.environment)
            return main(list(arguments))


@dataclass
class Machines:
    """New machines, all with empty spools."""

    root: Path
    endpoint: str
    url: str

    def __call__(self, endpoint: str = "") -> Machine:
        return Machine(self.root / f"machine-{next(NUMBERS)}", endpoint or self.endpoint, self.url)


@pytest.fixture
def machines(server: str, tmp_path: Path) -> Machines:
    """Of a storage of the test's own."""
    return Machines(tmp_path, server, f"s3://{BUCKET}/{tmp_path.name}/runs")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the run `whole` was trained, never stopped."""
    storage = tmp_path_factory.mktemp("directory")
    (storage / "toy.toml").touch()
    with process_as_it_was():
        assert main(["train", str(storage / "toy.toml"), f"--storage={storage}", "run.name=whole", *INLINE]) == 0
    return storage


def assert_same(machine: Machine, name: str, whole: Path) -> None:
    """Bit for bit the run that was never stopped, in what another machine finds in the storage."""
    run = machine.brought(name)
    spool = run.root.parent
    assert losses_of(spool, name) == losses_of(whole, "whole")
    assert rows_of(spool, name) == rows_of(whole, "whole")
    store = open_store(run.checkpoints_place)
    newest = pick(store, "newest")
    verify(store, newest)
    reader, expected = Reader(store, newest), weights_of(whole, "whole")
    assert reader.manifest.tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert reader.whole(key).equal(tensor), key


def commits(run: RunDir) -> int:
    """How many the first attempt has recorded on its own machine."""
    return [event["event"] for event in read_lines(run.attempts / "0001" / "ledger.jsonl")].count("checkpoint")


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def committed_by(run: RunDir, attempt: int) -> set[int]:
    return {
        manifest.step for _, manifest in committed(open_store(run.checkpoints_place)) if manifest.attempt == attempt
    }


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in merged_ledger(run) if event["event"] == name]


def test_a_killed_run_goes_on_on_another_machine_and_is_bit_identical(
    machines: Machines, whole: Path, server: str
) -> None:
    with faulty_proxy(server) as proxy:
        old, new = machines(proxy.endpoint), machines()
        process = old.start("killed", *INLINE)
        wait_for(lambda: commits(old.run("killed")) >= 2, 25, "two checkpoints")
        # all is uploaded but the manifest
        proxy.faults.append(Fault("stall", "PUT .*/manifest.json", times=9))
        wait_for(lambda: proxy.faults[0].times < 9, 20, "another save")
        kill(process)
    store = open_store(old.run("killed").checkpoints_place)
    unfinished, newest = max(store.names()), pick(store, "newest")
    assert unfinished > newest
    store.remove(f"{newest}/{next(name for name in store.names(newest) if name != 'manifest.json')}")
    assert new.lwray("train", str(old.spool / "toy.toml"), f"--storage={new.url}", "run.name=killed", *INLINE) == 0
    third = machines()
    assert_same(third, "killed", whole)
    skipped = [(event["checkpoint"], event["reason"]) for event in events(third.run("killed"), "skipped_checkpoint")]
    attempts = show.overview(third.run("killed"), [])["attempts"]
    assert attempts[0]["end"] < attempts[1]["start"]
    assert skipped[0] == (unfinished, "no manifest: it was never finished")
    assert [(name, "is missing" in reason) for name, reason in skipped[1:]] == [(newest, True)]
    assert 0 < events(third.run("killed"), "resumed")[0]["from_step"] < int(newest.split("-")[1])


def test_no_checkpoint_is_committed_before_the_steps_up_to_it_are_in_the_storage(
    machines: Machines, server: str
) -> None:
    with faulty_proxy(server) as proxy:
        old = machines(proxy.endpoint)
        proxy.faults.append(Fault("503 SlowDown", "PUT .*metrics.jsonl", times=999))
        process = old.start("ahead", *INLINE)
        wait_for(lambda: any("PUT" in each and "safetensors" in each for each in proxy.seen), 25, "a rank's file")
        time.sleep(1.0)
        kill(process)
        assert commits(old.run("ahead")) == 0
    store = open_store(old.run("ahead").checkpoints_place)
    assert store.names()
    assert list(committed(store)) == []


def test_a_store_that_fails_now_and_then_changes_nothing(machines: Machines, whole: Path, server: str) -> None:
    with faulty_proxy(server) as proxy:
        proxy.faults += [
            Fault("503 SlowDown", "PUT .*probe"),
            Fault("deaf", "PUT .*claim"),
            Fault("500 InternalError", "PUT .*run.json"),
            Fault("torn", "GET .*safetensors"),
            Fault("cut", "PUT .*safetensors"),
            Fault("stall", "PUT .*safetensors"),
            Fault("deaf", "PUT .*manifest.json"),
            Fault("503 SlowDown", "PUT .*manifest.json"),
            Fault("flip", "PUT .*metrics.jsonl"),
            Fault("deaf", "PUT .*ledger.jsonl"),
            Fault("cut", "PUT .*sample_ids.jsonl"),
            Fault("500 InternalError", "DELETE"),
            Fault("429 TooManyRequests", "PUT .*summary.json"),
        ]
        keys = ("checkpoint.every_steps=60", "checkpoint.asynchronous=false", "checkpoint.keep=2")
        toml = str(whole / "toy.toml")
        train = ("train", toml, f"--storage={machines.url}", "run.name=tried", *INLINE, *keys)
        assert machines(proxy.endpoint).lwray(*train) == 0
        assert [fault for fault in proxy.faults if fault.times] == []
    assert_same(machines(), "tried", whole)


def test_an_old_driver_that_wakes_up_commits_nothing_and_leaves_the_summary(machines: Machines, whole: Path) -> None:
    first, second, third = machines(), machines(), machines()
    old = first.start("fenced", *QUICKLY)
    wait_for(lambda: commits(first.run("fenced")) >= 2, 25, "two checkpoints")
    os.killpg(old.pid, signal.SIGSTOP)
    try:
        assert (
            second.lwray("train", str(first.spool / "toy.toml"), f"--storage={first.url}", "run.name=fenced", *QUICKLY)
            == 0
        )
        run = third.brought("fenced")
        before, summary = committed_by(run, 1), run.summary.read_bytes()
        os.killpg(old.pid, signal.SIGCONT)
        output, _ = old.communicate(timeout=20)
    finally:
        if old.poll() is None:
            kill(old)
    assert old.returncode == 1, output
    assert "Attempt 2 has taken fenced over" in output
    assert committed_by(run, 1) == before
    assert_same(third, "fenced", whole)
    assert run.summary.read_bytes() == summary
    assert [event["attempt"] for event in events(run, "superseded")] == [1]


@pytest.fixture(scope="module", name="kept")
def kept_run(server: str, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The machine that has trained the run `toy`."""
    root = tmp_path_factory.mktemp("kept")
    machine = Machine(root / "machine", server, f"s3://{BUCKET}/kept")
    (root / "toy.toml").touch()
    assert machine.lwray("train", *toy_on(machine), "--fresh") == 0
    return machine


def toy_on(machine: Machine) -> tuple[str, ...]:
    keys = (*TOY_KEYS, "tracking.enabled=false", "checkpoint.every_steps=5")
    return (str(machine.spool.parent / "toy.toml"), f"--storage={machine.url}", "--launcher=inline", *keys)


def test_show_reads_a_run_by_its_url(kept: Machine, machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    run = kept.run("toy")
    assert machines().lwray("show", run.url, "--verify", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["path"], shown["steps"], shown["attempts"][0]["ending"]) == (run.url, 20, "finished")
    assert {row["health"] for row in shown["checkpoints"]} == {"whole"}
    assert machines().lwray("show", f"{kept.url}/other") == 2
    assert f"in {kept.url} there are toy" in capsys.readouterr().err


def test_a_run_on_an_object_store_is_not_set_aside(kept: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert kept.lwray("train", *toy_on(kept), "--fresh") == 2
    assert "cannot rename what it holds. Choose another run.name" in capsys.readouterr().err
    assert kept.lwray("train", *toy_on(kept), "optim.lr=0.5") == 2
    assert "optim.lr: 0.01 became 0.5\nChoose another run.name.\n" in capsys.readouterr().err


def test_what_was_removed_from_the_storage_is_not_believed(
    kept: Machine, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    run = kept.run("toy")
    store = open_store(run.checkpoints_place)
    newest = pick(store, "newest")
    file = next(name for name in store.names(newest) if name != "manifest.json")
    store.put(f"{newest}/{file}", [store.read(f"{newest}/{file}")[:-1]])
    assert machines().lwray("show", run.url, "--verify") == 1
    assert f"Damaged: {newest}" in capsys.readouterr().err
    open_store(run.url).remove("")
    assert run.identity.exists()
    assert kept.lwray("show", run.url) == 2
    assert not run.root.exists()


def test_a_language_model_travels_with_its_data_and_no_secret_is_written(
    machines: Machines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = machines(), machines(), machines()
    door = Door(tmp_path / "door")
    door.root.mkdir()
    door.write()
    train = ("train", str(door.config), "--launcher=inline", f"--storage={first.url}")
    assert first.lwray(*train, "tracking.enabled=true") == 0
    assert "mlflow.db, on this machine and not in s3://" in capsys.readouterr().out
    assert second.lwray(*train, "run.name=second", f"init.from={first.url}/tiny@6", "run.seed=3") == 0
    ledger = merged_ledger(second.run("second"))
    assert ledger[0]["init"]["path"] == f"{first.url}/tiny/checkpoints"
    door.text.unlink()
    # what it was trained on is gone: the tokenised text comes from the storage
    assert third.lwray("export", f"{first.url}/tiny", "--out", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert_no_secret(tmp_path, str(capsys.readouterr()))


def assert_no_secret(directory: Path, output: str) -> None:
    for place, text in (*everything_on(directory), *everything_in_the_bucket(), ("the terminal", output.encode())):
        for secret in SECRETS:
            assert secret.encode() not in text, place


def everything_on(directory: Path) -> Iterator[tuple[str, bytes]]:
    return ((str(path), path.read_bytes()) for path in directory.rglob("*") if path.is_file())


def everything_in_the_bucket() -> Iterator[tuple[str, bytes]]:
    for entry in ask("list_objects_v2")["Contents"]:
        answer = ask("get_object", Key=entry["Key"])
        yield entry["Key"], answer["Body"] + str(answer["Metadata"]).encode()


@pytest.mark.parametrize(
    ("storage", "environment", "keys", "sentence"),
    [
        ("s3://nowhere/runs", {}, (), "there is no such bucket"),
        ("s3://bucket/runs", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, (), "the connection to the store failed"),
        ("s3://key:secret@bucket/runs", {}, (), "Credentials do not belong in it"),
        ("memory://bucket/runs", {}, (), "lives in one process"),
        (
            "s3://bucket/runs",
            {},
            (f"env.AWS_SECRET_ACCESS_KEY={SECRETS[1]}",),
            "is written into each attempt's config.toml",
        ),
    ],
)
def test_a_storage_that_cannot_be_used_is_bad_input(
    machines: Machines,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: str,
    environment: dict[str, str],
    keys: tuple[str, ...],
    sentence: str,
) -> None:
    machine = machines()
    monkeypatch.setattr(preflight, "PROBING", replace(preflight.PROBING, retry=Retry(0.1, 0.1, 0.1)))
    (tmp_path / "toy.toml").touch()
    with process_as_it_was():
        os.environ.update(machine.environment | environment)
        code = main(
            ["train", str(tmp_path / "toy.toml"), f"--storage={storage}", "--launcher=inline", *TOY_KEYS, *keys]
        )
    output = "".join(capsys.readouterr())
    assert code == 2, output
    assert sentence in output
    assert "secret@" not in output
    assert SECRETS[1] not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_workers_on_another_machine_are_told_to_stop_and_go_on(machines: Machines, tmp_path: Path) -> None:
    keys = (*KEYS, "train.steps=500", "checkpoint.every_steps=50", "parallel.workers=2", "parallel.cpus_per_worker=0.5")
    directory = replace(machines(), url=str(tmp_path / "directory"))
    finish(directory.start("whole", *keys), 100)
    driver, workers, others = machines(), machines(), machines()
    process = driver.start("apart", *keys, f"env.LWRAY_SPOOL={workers.spool}")
    attempt = driver.run("apart").attempts / "0001"
    try:
        # what is logged on the workers' machine is seen on the driver's
        wait_for(lambda: len(read_lines(attempt / "metrics.jsonl")) > 30, 90, "metrics")
        process.send_signal(signal.SIGTERM)
        asked = time.time()
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            kill(process)
    assert process.returncode == 143, output
    assert not (attempt / "logs" / "rank-00.txt").exists()
    run = machines().brought("apart")
    (stopped,) = events(run, "stopped")
    assert stopped["cause"] == "TERM"
    assert stopped["time"] - asked < 10
    assert_no_secret(tmp_path, output)
    assert next(committed(open_store(run.checkpoints_place)))[1].step == stopped["step"] < 500
    assert json.loads(run.summary.read_text())["step"] == stopped["step"]
    assert open_store(f"{run.attempts_place}/0001/logs").names() == ["rank-00.txt", "rank-01.txt"]
    finish(machines().start("apart", *keys, f"env.LWRAY_SPOOL={others.spool}"), 100)
    assert_same(machines(), "apart", Path(directory.url))
    assert events(machines().brought("apart"), "resumed")[0]["from_step"] == stopped["step"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_logs_of_workers_that_failed_are_brought_to_the_driver(machines: Machines) -> None:
    driver, workers = machines(), machines()
    fault = json.dumps([{"point": "step.update", "do": "fail", "step": 5, "rank": 0}])
    keys = (*KEYS, f"env.LWRAY_SPOOL={workers.spool}", f"env.{VARIABLE}='{fault}'", "cluster.max_failures=0")
    process = driver.start("failed", *keys)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert (
        "injected failure at step.update"
        in (driver.run("failed").attempts / "0001" / "logs" / "rank-00.txt").read_text()
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_cluster_whose_nodes_have_no_credentials_is_bad_input(machines: Machines, tmp_path: Path) -> None:
    driver = machines()
    home = tmp_path / "home"
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name)
        # neither ~/.aws nor the machine's role
        patch.setenv("HOME", str(home))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with ray_cluster(cpus=2) as cluster:
            driver = replace(driver, more=cluster.joined() | ENVIRONMENT)
            output, _ = (process := driver.start("blind", *KEYS)).communicate(timeout=90)
    assert process.returncode == 2, output
    assert "cannot be used from every node: " in output
    assert "no credentials were found" in output
