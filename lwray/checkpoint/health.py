"""The checkpoints of a run as a table, and whether each can be used; never imports torch."""

from dataclasses import dataclass
from typing import Literal

from lwray.checkpoint.find import damage, newest_first, val_loss_of
from lwray.checkpoint.manifest import NAME, GivenUp, Manifest, NewerFormat, place_of, read_manifest
from lwray.store import Store

Health = Literal[
    "not verified", "whole", "damaged", "manifest unreadable", "newer format", "unfinished", "given up", "unknown"
]
"""`unknown`: the store did not answer, which says nothing about what lies there."""


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint. What only a manifest tells is None where there is none to be read."""

    name: str
    step: int
    attempt: int
    health: Health
    reason: str | None
    """What is wrong, in a sentence; None where nothing more is known than `health` says."""
    time: float | None = None
    """Unix seconds."""
    bytes: int | None = None
    backend: str | None = None
    workers: int | None = None
    """How many wrote it."""
    cause: str | None = None
    val_loss: float | None = None
    """Of this very state, in nats; None where it was not evaluated."""

    @property
    def damaged(self) -> bool:
        """Whether it was committed, and is no longer what was written."""
        return self.health in ("damaged", "manifest unreadable")


def checkpoints(store: Store, *, verify: bool) -> list[Row]:
    """All of them, oldest first. Reads manifests alone; with `verify`, every byte of each committed checkpoint.

    A run that trains meanwhile may delete some: those are left out. Raises OSError where the store cannot be listed.
    """
    rows = [_row(store, name, verify) for name in reversed(newest_first(store))]
    there = set(newest_first(store))
    return [row for row in rows if row.name in there]


def _row(store: Store, name: str, verify: bool) -> Row:
    try:
        manifest = read_manifest(store, name)
    except GivenUp as error:
        return _without_manifest(name, "given up", str(error))
    except NewerFormat as error:
        return _without_manifest(name, "newer format", str(error))
    except OSError as error:
        return _without_manifest(name, "unknown", str(error))
    except ValueError as error:
        if not _has_manifest(store, name):
            return _without_manifest(name, "unfinished")
        return _without_manifest(name, "manifest unreadable", str(error))
    if not verify:
        return _committed(name, manifest, "not verified")
    try:
        reason = damage(store, name)
    except OSError as error:
        return _committed(name, manifest, "unknown", str(error))
    if reason is None:
        return _committed(name, manifest, "whole")
    # a deletion takes the manifest first: what is missing after it is no damage
    if not _has_manifest(store, name):
        return _without_manifest(name, "unfinished")
    return _committed(name, manifest, "damaged", reason)


def _has_manifest(store: Store, name: str) -> bool:
    return store.size(f"{name}/{NAME}") is not None


def _without_manifest(name: str, health: Health, reason: str | None = None) -> Row:
    step, attempt = place_of(name)
    return Row(name, step, attempt, health, reason)


def _committed(name: str, manifest: Manifest, health: Health, reason: str | None = None) -> Row:
    return Row(
        name=name,
        step=manifest.step,
        attempt=manifest.attempt,
        health=health,
        reason=reason,
        time=manifest.time,
        bytes=manifest.bytes,
        backend=manifest.backend,
        workers=manifest.workers,
        cause=manifest.cause,
        val_loss=val_loss_of(manifest),
    )
