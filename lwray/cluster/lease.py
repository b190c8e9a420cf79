"""Which attempt of a run is alive: a small file in its storage that the driver writes anew every few seconds.

Clocks of two machines are never compared: whoever wants the run watches whether the count moves. This keeps a run from
being started twice by mistake; that an old driver commits nothing is the fence's work (checkpoint/fence.py).
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lwray.config.schema import Config
from lwray.errors import UserError
from lwray.store import Store, open_store
from lwray.store.client import Limits
from lwray.store.objects import ObjectStore
from lwray.store.retry import Retry
from lwray.tracking.rundir import RunDir
from lwray.tracking.storage import storage_answers

NAME = "lease.json"
BEATS, SHORTEST_S = 6, 0.1
"""The count moves so often in `cluster.lease_s`, and seconds that it stands at least."""
LEAVE_S = 10.0
"""How long the end of a run waits for a storage that does not answer."""
QUICK = Limits(read_seconds=10.0, request_seconds=20.0, retry=Retry(patience=5.0))
"""The next beat is a try of its own."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
HELD: set[str] = set()
"""Tokens of the leases that this process holds now."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has the lease: the content of the file."""

    attempt: int
    host: str
    pid: int
    born: int | None
    """When the process was started, in the kernel's ticks: a number may be another process's by now."""
    space: str | None
    """Where the process number means this process; None where that cannot be told."""
    token: str
    every: float
    """Seconds between two beats."""
    count: int = 0
    ending: bool = False
    """It was asked to stop and is about to end."""

    @classmethod
    def here(cls, attempt: int, every: float) -> "Holder":
        """This process."""
        pid = os.getpid()
        return cls(attempt, socket.gethostname(), pid, born(pid), process_space(), secrets.token_hex(8), every)

    @property
    def is_gone(self) -> bool:
        """Whether it is certain, without waiting, that this process lives no more, or holds the lease no more."""
        if self.space is None or self.space != process_space():
            return False
        if self.pid == os.getpid() and self.born == born(self.pid):
            return self.token not in HELD
        return is_dead(self.pid) or born(self.pid) != self.born

    def __str__(self) -> str:
        return f"attempt {self.attempt} on {self.host} (process {self.pid})"


class Lease:
    """Held from here to `close`, by a thread of its own; a storage that fails ends and delays nothing."""

    def __init__(self, run: RunDir, attempt: int, seconds: float, is_ending: Callable[[], bool]) -> None:
        """`seconds` is how long the count must stand still before another start takes the run over."""
        self._store = lease_store(run)
        self._holder = Holder.here(attempt, max(seconds / BEATS, SHORTEST_S))
        self._is_ending = is_ending
        self._written = False
        self._done = threading.Event()
        HELD.add(self._holder.token)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the next start go on at once."""
        self._done.set()
        self._thread.join(LEAVE_S)
        HELD.discard(self._holder.token)

    def _keep(self) -> None:
        while True:
            # the storage may answer again at the next beat
            with suppress(OSError):
                if self._written and self._is_lost():
                    return
                self._beat()
            if self._done.wait(self._holder.every):
                break
        with suppress(OSError):
            if self._is_ours():
                self._store.remove(NAME)

    def _beat(self) -> None:
        self._holder = replace(self._holder, count=self._holder.count + 1, ending=self._is_ending())
        self._store.put(NAME, [json.dumps(asdict(self._holder)).encode()])
        self._written = True

    def _is_lost(self) -> bool:
        """After a later attempt has taken the run over, and where the run was moved or removed."""
        now = self._read()
        return now is None or now.attempt > self._holder.attempt

    def _is_ours(self) -> bool:
        now = self._read()
        return now is not None and now.token == self._holder.token

    def _read(self) -> Holder | None:
        """Raises OSError where the storage does not answer, or gives no lease."""
        try:
            return read_holder(self._store)
        except UserError as error:
            raise OSError(str(error)) from error


def await_lease(run: RunDir, config: Config, say: Callable[[str], None], judged: Holder | None = None) -> Holder | None:
    """Return once nobody trains the run: at once, or when its lease stood still for `cluster.lease_s`.

    Of the latter the holder is returned, from which the run is taken over; `judged` was found so before. One that is
    about to end is waited for. Raises UserError where the run is being trained.
    """
    store = lease_store(run)
    with storage_answers(run.url):
        holder = read_holder(store)
        if holder is None or holder == judged or holder.is_gone:
            return judged if holder == judged else None
        patience = max(config.cluster.lease_s, 3 * holder.every)
        say(f"{run.place}: {holder} may be alive; its lease is watched for up to {patience:.0f} s.")
        return watch(run, store, holder, patience, config.checkpoint.deadline)


def watch(run: RunDir, store: Store, holder: Holder, patience: float, ending: float) -> Holder | None:
    """The holder, once its lease stood still for `patience` seconds; None once it is released.

    Raises UserError where it moves; but a holder that is about to end is waited for, `ending` seconds at most.
    """
    begun = moved = time.monotonic()
    while time.monotonic() - moved < patience:
        time.sleep(min(1.0, patience / 20))
        now = read_holder(store)
        if now is None or now.is_gone:
            return None
        if now != holder:
            if not now.ending or time.monotonic() - begun > ending:
                raise UserError(
                    f"{run.place} is being trained by {now}. Stop that one first (Ctrl-C, `kill {now.pid}` there, or "
                    "stop its job), or choose another run.name."
                )
            holder, moved = now, time.monotonic()
    return holder


def read_holder(store: Store) -> Holder | None:
    """Who has the lease, or had it last; None where it is released. Raises UserError where that cannot be read."""
    try:
        data = store.read(NAME)
    except FileNotFoundError:
        return None
    try:
        return Holder(**json.loads(data))
    except (ValueError, TypeError):
        raise UserError(f"{store.url}/{NAME} is damaged. Remove it if nothing trains this run.") from None


def lease_store(run: RunDir) -> Store:
    """Where the lease lies; an object store is not waited for as long as for a checkpoint."""
    return ObjectStore(run.url, QUICK) if run.url else open_store(run.place)


def process_space() -> str | None:
    """The machine since it was switched on, and the container where processes are numbered apart."""
    if not BOOT.exists():
        return None
    return f"{BOOT.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def is_dead(pid: int) -> bool:
    """Whether no process has this number; one that is only waiting to be reaped is dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return born(pid) is None


def born(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; None where it runs no more, or cannot be seen."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])
