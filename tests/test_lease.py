"""One attempt of a run is alive at a time: a second start waits, is refused, or takes over one that gives no sign."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ray_cluster import wait_for
from s3_server import BUCKET, ENVIRONMENT, s3_server
from test_resume import KEYS, finish, last_step, start

from lwray.cluster import lease
from lwray.cluster.lease import Holder, Lease, await_lease, read_holder
from lwray.config import Config
from lwray.errors import UserError
from lwray.faults import VARIABLE
from lwray.store.local import LocalStore
from lwray.tracking.rundir import RunDir

INLINE = ("--launcher=inline", *KEYS, "checkpoint.every_steps=7")
SOON = Config.model_validate({"cluster": {"lease_s": 0.6}})
SLOWLY = [{"point": "step.data", "do": "delay", "seconds": 0.05}]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def hold(run: RunDir, attempt: int = 1, ending: Callable[[], bool] = lambda: False) -> Lease:
    return Lease(run, attempt, SOON.cluster.lease_s, ending)


def holder(run: RunDir) -> Holder | None:
    return read_holder(LocalStore(run.root))


def seen(run: RunDir) -> Holder:
    wait_for(lambda: holder(run), 5, "the first beat")
    found = holder(run)
    assert found is not None
    return found


def left_behind(run: RunDir, **fields: object) -> Holder:
    """A lease that nobody keeps any more."""
    found = dataclasses.replace(Holder.here(1, 0.1), count=3, **fields)
    (run.root / lease.NAME).write_text(json.dumps(dataclasses.asdict(found)))
    return found


def silent(text: str) -> None:
    """Where what is said is of no interest."""


def test_a_run_that_is_being_trained_is_refused_and_one_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, json.dumps(SLOWLY))
        first = start(tmp_path, "one", *INLINE)
    try:
        wait_for(lambda: last_step(run) >= 20, 25, "step 20")
        second, fresh = start(tmp_path, "one", *INLINE), start(tmp_path, "one", *INLINE, "--fresh")
        for refused in (second, fresh):
            output, _ = refused.communicate(timeout=25)
            assert refused.returncode == 2, output
            assert f"is being trained by attempt 1 on {seen(run).host} (process {first.pid})." in output
            assert "choose another run.name" in output
        first.send_signal(signal.SIGTERM)
        finish(start(tmp_path, "one", *INLINE), 25)
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == 143
    assert [attempt.number for attempt in run.attempts_in_order()] == [1, 2]
    assert holder(run) is None


def test_a_lease_that_moves_is_respected_and_one_that_was_let_go_is_not_there(run: RunDir) -> None:
    said: list[str] = []
    with closing(hold(run)):
        found = seen(run)
        with pytest.raises(
            UserError, match=r"is being trained by attempt 1 on .* \(process \d+\)\. Stop that one first"
        ):
            await_lease(run, SOON, said.append)
    assert said == [f"{run.place}: {found} may be alive; its lease is watched for up to 1 s."]
    assert await_lease(run, SOON, said.append) is None
    assert len(said) == 1


@pytest.mark.parametrize("elsewhere", [{"space": "another machine"}, {"space": None}], ids=["known", "unknown"])
def test_one_that_stands_still_on_another_machine_is_taken_over_after_its_time(
    run: RunDir, elsewhere: dict[str, object]
) -> None:
    found = left_behind(run, **elsewhere)
    began = time.monotonic()
    assert await_lease(run, SOON, silent) == found
    assert 0.6 <= time.monotonic() - began < 2
    began = time.monotonic()
    assert await_lease(run, SOON, silent, judged=found) == found
    assert time.monotonic() - began < 0.3


def test_a_slower_beat_than_our_own_is_given_its_time(run: RunDir) -> None:
    left_behind(run, space=None, every=0.5)
    began = time.monotonic()
    assert await_lease(run, SOON, silent)
    assert time.monotonic() - began >= 1.5


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(run: RunDir) -> None:
    code = (
        "import os, signal, sys, time; from pathlib import Path; from lwray.cluster.lease import Lease, NAME\n"
        "from lwray.tracking.rundir import RunDir\n"
        "run = RunDir(Path(sys.argv[1])); Lease(run, 1, 600, lambda: False)\n"
        "while not (run.root / NAME).exists(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(run.root)])
    # a zombie is gone already
    wait_for(lambda: holder(run) and lease.is_dead(killed.pid), 20, "the end of the holder")
    long = Config.model_validate({"cluster": {"lease_s": 600}})
    assert await_lease(run, long, silent) is None
    killed.wait()
    assert await_lease(run, long, silent) is None


def test_a_number_that_is_another_process_by_now_is_no_holder(run: RunDir) -> None:
    assert left_behind(run, pid=1, born=17).is_gone
    assert left_behind(run).is_gone, "what this very process has let go of"


def test_a_holder_that_is_ending_is_waited_for(run: RunDir) -> None:
    ending = threading.Event()
    first = hold(run, ending=ending.is_set)
    seen(run)
    ending.set()
    threading.Timer(1.2, first.close).start()
    began = time.monotonic()
    assert await_lease(run, SOON, silent) is None
    assert time.monotonic() - began >= 1.0


def test_an_old_holder_leaves_the_lease_of_a_later_attempt_alone(run: RunDir) -> None:
    old = hold(run)
    seen(run)
    with closing(hold(run, attempt=2)):
        wait_for(lambda: seen(run).attempt == 2, 5, "the second attempt's lease")
        time.sleep(0.3)
        old.close()
        assert seen(run).attempt == 2


def test_a_run_that_was_removed_is_not_made_again(run: RunDir) -> None:
    # a beat every half second, and the first has just been
    with closing(Lease(run, 1, 3, lambda: False)):
        seen(run)
        shutil.rmtree(run.root)
        time.sleep(1.2)
    assert not run.root.exists()


class Failing(LocalStore):
    """Fails until it is mended."""

    mended = False

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        if not self.mended:
            raise OSError("the storage is away")
        super().put(path, chunks)


def test_a_storage_that_fails_is_tried_again_and_ends_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Failing(run.root)
    monkeypatch.setattr(lease, "lease_store", lambda run: store)
    with closing(hold(run)):
        time.sleep(0.3)
        assert holder(run) is None
        store.mended = True
        seen(run)
        store.mended = False
        time.sleep(0.3)
    assert holder(run) is None


def test_a_storage_that_never_answers_does_not_hold_up_the_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEAVE_S", 0.2)
    answer = threading.Event()

    class Hanging(LocalStore):
        def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
            answer.wait()

    monkeypatch.setattr(lease, "lease_store", lambda run: Hanging(run.root))
    began = time.monotonic()
    hold(run).close()
    assert time.monotonic() - began < 1
    answer.set()


def test_a_damaged_lease_is_said_with_what_to_do(run: RunDir) -> None:
    (run.root / lease.NAME).write_text("{")
    with pytest.raises(UserError, match=r"lease\.json is damaged\. Remove it"):
        await_lease(run, SOON, silent)


@pytest.fixture
def on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    with s3_server() as endpoint:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield RunDir(tmp_path / "spool", f"s3://{BUCKET}/runs/one")


def test_a_lease_on_an_object_store_is_the_same(on_s3: RunDir) -> None:
    with closing(hold(on_s3)):
        wait_for(lambda: read_holder(lease.lease_store(on_s3)), 10, "the first beat")
        with pytest.raises(UserError, match=r"s3://bucket/runs/one is being trained by attempt 1"):
            await_lease(on_s3, SOON, silent)
    assert await_lease(on_s3, SOON, silent) is None
