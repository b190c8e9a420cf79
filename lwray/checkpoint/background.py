"""A rank's side of its writer process: copy, hand over, hear of it."""

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from typing import Any

import torch

from lwray.checkpoint.commit import Keep
from lwray.checkpoint.fragment import Layout
from lwray.checkpoint.manifest import Manifest, encode
from lwray.checkpoint.staging import Staging
from lwray.store import Store

REAPED_S = 5.0
"""Seconds that a killed writer is waited for."""


class Background:
    """One writer process and the memory it reads from; it does one thing at a time.

    It has a session of its own, so that a Ctrl-C meant for the rank does not end it in the middle of a save.
    """

    def __init__(self, store: Store, attempts: Store, device: torch.device) -> None:
        self.staging = Staging(device)
        self._command = [sys.executable, "-m", __name__.replace("background", "writer"), store.url, attempts.url]
        self._process = self._start()

    def copy(self, layout: Layout) -> None:
        """Take the state as it is now; nothing may be under way."""
        if self._process.poll() is not None:
            self.restart()
        self.staging.fill(layout)

    def write(self, path: str, size: int, step: int, rank: int) -> None:
        """Have what was copied written to `path` of the store; the answer is a FileEntry's fields, or `error`."""
        self._ask({"path": path, "size": size, "step": step, "rank": rank})

    def commit(self, manifest: Manifest, keep: Keep) -> None:
        """Have it committed; the answer is `superseded_by` (None where it was committed), or `error`."""
        self._ask({"manifest": encode(manifest).decode(), "keep": {"newest": keep.newest, "best": keep.best}})

    def remove(self, path: str) -> None:
        """Have a file of a save that failed removed; there is no answer."""
        self._ask({"remove": path})

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The answer, `error` where the process died; None where there is none within `seconds`."""
        assert self._process.stdout is not None
        # not select.select, which takes no descriptor above 1023
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        if not poll.poll(1000 * max(0.0, seconds)):
            return None
        line = self._process.stdout.readline()
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        return {"error": f"the writer process ended with code {self._process.wait()}"}

    def restart(self) -> None:
        """Leave what is under way alone and go on with a new process and new memory."""
        device = self.staging.device
        self.close()
        self.staging = Staging(device)
        self._process = self._start()

    def close(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()
        # one that hangs in a dead file system cannot be reaped: it is left, and never answers
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=REAPED_S)
        self.staging.close()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, str(self.staging.descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[self.staging.descriptor],
            # a Ray job's working directory is on this process's path only
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # of a process that has died, `wait` tells
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
