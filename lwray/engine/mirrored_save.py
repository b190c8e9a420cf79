"""Saves of a run on an object store: a checkpoint is committed once the journal up to it is there too.

A run that is killed on one machine goes on on another, from what the storage has: were the checkpoint there first, the
lines of the steps before it would be lost for good.
"""

import time
from typing import Any

from lwray.engine.progress import Progress
from lwray.engine.save import Saver
from lwray.engine.under_way import Save
from lwray.tracking.turns import Turns

PAUSE_S = 0.05


class MirroredSaver(Saver):
    """`turns` brings rank 0's journal to the storage; the other ranks have none, and wait for its word."""

    def __init__(self, *arguments: Any, turns: Turns | None) -> None:
        self._turns = turns
        self._asked = 0
        super().__init__(*arguments)

    def begin(self, progress: Progress, cause: str) -> None:
        """As `Saver.begin`; the journal is brought to the storage at the same time."""
        # one that is owed begins again later
        if self._turns is not None and (self._under_way is None or cause == "best"):
            self._asked = self._turns.ask()
        super().begin(progress, cause)

    def _standing(self, patience: float, wait: float) -> dict[str, float]:
        """Rank 0 has not written before its journal is: then the manifest waits, and training does not."""
        flags = super()._standing(patience, wait)
        if flags["save_written"] and self._turns is not None and not self._turns.reached(self._asked):
            flags["save_written"] = 0.0
            time.sleep(min(wait, PAUSE_S))
        return flags

    def _try(self, save: Save, unhurried: bool) -> str | None:
        if self._turns is not None:
            try:
                self._turns.settle()
            except OSError as problem:
                save.error = str(problem)
        return super()._try(save, unhurried)
