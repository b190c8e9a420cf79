"""A save from the copy of the state to the commit: what it holds, and how far one rank knows it to be."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lwray.checkpoint.background import Background
from lwray.checkpoint.fragment import Layout, Part, tensor_index
from lwray.checkpoint.manifest import FileEntry, Manifest, directory_name


@dataclass(slots=True)
class Save:
    """One save. It is `writing` until each rank's file is on disk, and `committing` until the manifest is.

    `part`, `error`, `committed` and `superseded_by` are what this rank knows; the agreement of a step makes it
    everybody's.
    """

    step: int
    attempt: int
    cause: str
    progress: dict[str, Any]
    file: str
    layout: Layout
    started: float
    """By time.monotonic(), as `since`."""
    since: float
    """When its phase began."""
    blocked: float = 0.0
    """Seconds that training stood still."""
    phase: Literal["writing", "committing"] = "writing"
    part: Part | None = None
    error: str | None = None
    manifest: Manifest | None = None
    committed: bool = False
    superseded_by: int | None = None

    @property
    def name(self) -> str:
        return directory_name(self.step, self.attempt)

    @property
    def path(self) -> str:
        """This rank's file in the store."""
        return f"{self.name}/{self.file}"

    def written(self, entry: FileEntry) -> None:
        """This rank's file is on disk."""
        self.part = Part(self.file, entry, self.layout.pieces)

    def listen(self, background: Background, first: bool, seconds: float) -> None:
        """Take the writer's answer, if one is to come (in the second phase only to the `first` rank) in `seconds`."""
        awaited = self.part is None if self.phase == "writing" else first and not self.committed
        if not awaited or self.error is not None or self.superseded_by is not None:
            return
        reply = background.wait(seconds)
        if reply is None:
            return
        if "error" in reply:
            self.error = reply["error"]
        elif self.phase == "writing":
            self.written(FileEntry(**reply))
        else:
            self.superseded_by = reply["superseded_by"]
            self.committed = self.superseded_by is None

    def complete(self, parts: Sequence[Part], backend: str, frozen: Mapping[str, str]) -> Manifest:
        """The manifest, from every rank's part."""
        self.manifest = Manifest(
            step=self.step,
            attempt=self.attempt,
            time=time.time(),
            cause=self.cause,
            backend=backend,
            workers=len(parts),
            files={part.file: part.entry for part in parts},
            tensors=tensor_index(parts),
            progress=self.progress,
            frozen=dict(frozen),
        )
        return self.manifest


def standing(save: Save | None, late: bool) -> dict[str, float]:
    """What a rank puts into the agreement about the save under way; `late` is the first rank's to say.

    In the second phase a rank that has written has no more to do: a failure then is the first rank's alone.
    """
    return {
        "save_written": float(save is not None and save.part is not None and save.error is None),
        "save_failed": float(save is not None and save.error is not None),
        "save_committed": float(save is not None and save.committed),
        "save_superseded": float((save.superseded_by or 0) if save is not None else 0),
        "save_late": float(save is not None and late),
    }
