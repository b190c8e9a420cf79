"""The commit of a checkpoint, in which all ranks take part, beside the training or while it stands still."""

import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress

from lwray.checkpoint.background import Background
from lwray.checkpoint.commit import Keep, commit
from lwray.checkpoint.fragment import Fragment, Layout, lay_out
from lwray.checkpoint.write import part_name, struck, write_part
from lwray.config.schema import CheckpointSection
from lwray.engine.backends import Backend
from lwray.engine.backends.backend import MOMENTS, persistent_buffers
from lwray.engine.interval import Interval
from lwray.engine.progress import Progress
from lwray.engine.session import FINISHED
from lwray.engine.under_way import Save, standing
from lwray.engine.world import World
from lwray.errors import RunFailed, Superseded, UserError
from lwray.faults import reach
from lwray.store import open_store
from lwray.tracking.journal import Journal
from lwray.tracking.rundir import Attempt, RunDir

log = logging.getLogger(__name__)

TRIES, PAUSE_S = 3, 5.0
"""How often the last save of an attempt is tried, and seconds between."""
SLICE_S = 0.5
"""How long a rank that waits for its writer listens before it hears the others."""
HURRY_S = 2.0
"""Seconds that a run which is stopped gives to the save under way, before it saves its last state."""


class Saver:
    """Commits checkpoints of one attempt; at most one save is under way."""

    def __init__(
        self,
        section: CheckpointSection,
        run: RunDir,
        attempt: Attempt,
        backend: Backend,
        world: World,
        journal: Journal | None,
        frozen: Mapping[str, str],
        interval: Interval,
    ) -> None:
        self.run, self.attempt, self.backend, self.world, self.journal = run, attempt, backend, world, journal
        self.frozen, self.interval, self.deadline = frozen, interval, section.deadline
        self.store, self.attempts = open_store(run.checkpoints_place), open_store(run.attempts_place)
        self.keep = Keep(section.keep, section.keep_best)
        self.seconds = 0.0
        """What the latest save took, from the copy to the commit."""
        self._owed = False
        self._under_way: Save | None = None
        self._stand_still = False
        """The last save was given up at its deadline: the next one is waited for."""
        self._background: Background | None = None
        # also where no save goes on beside the training: what cannot be saved is told now
        expected = self._expected_bytes()
        if section.asynchronous and (section.every_steps or interval.seconds or section.keep_best):
            self._background = Background(self.store, self.attempts, world.device)
            self._background.staging.reserve(expected)

    # ---- beside the training

    def begin(self, progress: Progress, cause: str) -> None:
        """Copy the state after `progress.step` updates and have it written; due while another is, it is owed."""
        if cause == "best":
            # a later state would not be the best one
            self.finish(self.deadline)
        self._owed = self._under_way is not None
        if self._owed:
            return
        if self._background is None or self._stand_still:
            self.save(progress, cause)
            return
        self._under_way = save = self._take(progress, cause)
        reach("checkpoint.copy", save.step, self.world.rank)
        self._background.copy(save.layout)
        self._background.write(save.path, save.layout.size, save.step, self.world.rank)
        self.interval.begun()
        save.blocked = time.monotonic() - save.started

    @property
    def owes(self) -> bool:
        """Whether a save was due while another was under way, and can begin now."""
        return self._owed and self._under_way is None

    def flags(self) -> dict[str, float]:
        """What this rank knows of the save under way, for the agreement of a step."""
        return self._standing(self.deadline, wait=0.0)

    def advance(self, agreed: Mapping[str, float]) -> None:
        """Take what all ranks know. Raises Superseded in an attempt that has lost the run."""
        save = self._under_way
        if save is None:
            return
        began = time.monotonic()
        answered = agreed["save_failed"] + agreed["save_written"] >= self.world.size
        if agreed["save_superseded"]:
            self._give_way(int(agreed["save_superseded"]))
        elif agreed["save_failed"] and answered:
            self._failed(save, self._first_error(save.error))
        elif agreed["save_committed"]:
            self._committed(save)
        elif save.phase == "writing" and answered:
            self._complete(save)
            if save.manifest is not None and self._background is not None:
                self._background.commit(save.manifest, self.keep)
            save.blocked += time.monotonic() - began
        elif agreed["save_late"]:
            self._abandon(save)

    def finish(self, patience: float) -> None:
        """Wait for the save that is under way, if there is one; after `patience` seconds in a phase it is given up."""
        if self._under_way is not None:
            self._under_way.since = time.monotonic()
        while self._under_way is not None:
            everyone = self.world.gather(self._standing(patience, wait=min(patience, SLICE_S)))
            self.advance({name: sum(each[name] for each in everyone) for name in everyone[0]})

    # ---- while it stands still

    def save(self, progress: Progress, cause: str, *, last: bool = False) -> None:
        """Commit the state after `progress.step` updates. Raises Superseded in an attempt that has lost the run.

        The `last` save of an attempt is tried again where it fails, and raises RunFailed in the end; of any other that
        fails it is only said so.
        """
        # whoever is stopped has little time: an older save is not waited for, this one not read back, nothing deleted
        unhurried = cause not in ("final", "notice") or progress.ended in FINISHED
        self.finish(self.deadline if unhurried else HURRY_S)
        for attempt in range(1, TRIES + 1):
            error = self._try(self._take(progress, cause), unhurried)
            if error is None or not last:
                return
            if attempt < TRIES:
                time.sleep(PAUSE_S)
        raise RunFailed(
            f"The state of step {progress.step} could not be saved ({error}). The checkpoint before it stands: make "
            "room or repair the storage, and run the same command again."
        )

    def close(self) -> None:
        """End the writer process."""
        if self._background is not None:
            self._background.close()

    def _try(self, save: Save, unhurried: bool) -> str | None:
        """None, or why it failed: the same on every rank."""
        try:
            chunks = struck(save.layout.chunks(), save.step, self.world.rank)
            save.written(write_part(self.store, save.path, chunks, read_back=unhurried))
        except OSError as problem:
            save.error = str(problem)
        error = self._first_error(save.error)
        if error is None:
            self._complete(save)
            if save.manifest is not None:
                try:
                    keep = self.keep if unhurried else None
                    save.superseded_by = commit(self.store, self.attempts, save.manifest, keep)
                except (OSError, UserError) as problem:
                    save.error = str(problem)
            error = self._first_error(save.error)
            if (later := self.world.from_first(save.superseded_by)) is not None:
                self._give_way(later)
        if error is not None:
            self._failed(save, error)
            return error
        self.interval.begun()
        self._stand_still = False
        save.blocked = time.monotonic() - save.started
        self._committed(save)
        return None

    # ---- what both do

    def _take(self, progress: Progress, cause: str) -> Save:
        started = time.monotonic()
        return Save(
            step=progress.step,
            attempt=self.attempt.number,
            cause=cause,
            progress=progress.as_json(),
            file=part_name(self.world.rank, secrets.token_hex(4)),
            layout=self._layout(),
            started=started,
            since=started,
        )

    def _complete(self, save: Save) -> None:
        """Every rank's part is there: the first one, which commits, makes the manifest of them."""
        save.phase, save.since = "committing", time.monotonic()
        parts = self.world.gather(save.part)
        if self.world.rank == 0:
            save.complete(parts, self.backend.name, self.frozen)

    def _layout(self) -> Layout:
        """This rank's share of the canonical state; buffers are written by the first rank alone."""
        fragments = list(self.backend.state())
        if self.world.rank == 0:
            named = persistent_buffers(self.backend.inner.network)
            fragments += [Fragment.whole(f"buffer/{name}", buffer) for name, buffer in named.items()]
        return lay_out(fragments)

    def _expected_bytes(self) -> int:
        """Bytes of this rank's file, or a little more; before the first update the moments are still to come."""
        layout = self._layout()
        has_moments = any(fragment.key.startswith(MOMENTS) for fragment in layout.fragments)
        # their names in the header are longer
        return layout.size if has_moments else layout.size * (1 + len(MOMENTS)) + len(layout.prefix)

    def _standing(self, patience: float, wait: float) -> dict[str, float]:
        """What this rank knows, after `wait` seconds at most; late is what the first rank has waited too long for."""
        save, first = self._under_way, self.world.rank == 0
        if save is not None and self._background is not None:
            save.listen(self._background, first, wait)
        return standing(save, late=first and save is not None and time.monotonic() - save.since >= patience)

    def _first_error(self, error: str | None) -> str | None:
        """The error of the lowest rank that has one, on every rank."""
        return next((each for each in self.world.gather(error) if each is not None), None)

    def _committed(self, save: Save) -> None:
        self._under_way = None
        self.seconds = total = time.monotonic() - save.started
        self.interval.measured(save.blocked, total)
        if self.journal is not None and save.manifest is not None:
            self.journal.event(
                "checkpoint",
                step=save.step,
                blocked_s=save.blocked,
                total_s=total,
                bytes=save.manifest.bytes,
                cause=save.cause,
            )

    def _failed(self, save: Save, reason: str | None) -> None:
        """The run goes on, the checkpoint before stands, and a save is tried again soon."""
        self._under_way = None
        self.interval.failed()
        if self.journal is not None:
            self.journal.event("checkpoint_failed", step=save.step, cause=save.cause, reason=reason)
        if self.world.rank == 0:
            log.warning("The checkpoint of step %d was not written: %s. The one before stands.", save.step, reason)
        # of a commit only the answer may be lost; and nobody waits for a storage that has just failed
        if save.phase == "writing":
            self._remove(save.path)

    def _remove(self, path: str) -> None:
        """This rank's file of a save that failed, a name that no other save has: room for the next one."""
        if self._background is not None:
            self._background.remove(path)
        else:
            # what cannot be removed now goes with its directory, after a later commit
            with suppress(OSError):
                self.store.remove(path)

    def _abandon(self, save: Save) -> None:
        """A save that takes too long: its writer is ended."""
        self._stand_still = True
        if self._background is not None:
            self._background.restart()
        self._failed(save, "it was not done in time")

    def _give_way(self, later: int) -> None:
        """One run, one writer: an old driver that came back stops."""
        self._under_way = None
        if self.journal is not None:
            self.journal.event("superseded", by_attempt=later)
        raise Superseded(
            f"Attempt {later} has taken {self.run.root.name} over; attempt {self.attempt.number} commits nothing more."
        )
