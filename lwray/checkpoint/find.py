"""Find checkpoints, and the newest one that is whole."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from lwray.checkpoint.manifest import FileEntry, GivenUp, Manifest, NewerFormat, place_of, read_manifest
from lwray.store import Store

BLOCK = 1 << 24
DIRECTORY = re.compile(r"step-\d{8,}-\d{4,}")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest whole checkpoint (None if there is none) and the newer ones that had to be skipped."""

    name: str | None
    skipped: tuple[Skipped, ...]


def newest_first(store: Store) -> list[str]:
    """The names of all checkpoints, finished or not, by step and attempt, newest first."""
    return sorted((name for name in store.names() if DIRECTORY.fullmatch(name)), key=place_of, reverse=True)


def committed(store: Store) -> Iterator[tuple[str, Manifest]]:
    """Name and manifest of every checkpoint that has a readable one, newest first; no tensor is looked at.

    Raises NewerFormat, with the name, at one that a later version wrote: what is older is not the run's state any more.
    """
    for name in newest_first(store):
        try:
            yield name, read_manifest(store, name)
        except NewerFormat as error:
            raise NewerFormat(f"{name}: {error}") from None
        except ValueError:
            continue


def find_newest(names: Sequence[str], damage: Callable[[str], str | None]) -> Found:
    """The first of `names` (newest first) that `damage` finds nothing wrong with."""
    skipped: list[Skipped] = []
    for name in names:
        reason = damage(name)
        if reason is None:
            return Found(name, tuple(skipped))
        if reason:
            skipped.append(Skipped(name, reason))
    return Found(None, tuple(skipped))


def damage(store: Store, name: str, reader: int = 0, readers: int = 1) -> str | None:
    """None where every byte is what the manifest says, else the reason; "" for one given up, which is no news.

    With several readers, each reads its share of the files. Raises NewerFormat (a run must not fall back behind it),
    and OSError where the store fails: a disk that does not answer now says nothing about what lies on it.
    """
    try:
        verify(store, name, reader, readers)
    except NewerFormat:
        raise
    except GivenUp:
        return ""
    except ValueError as error:
        return str(error)
    return None


def verify(store: Store, name: str, reader: int = 0, readers: int = 1) -> Manifest:
    """Read every byte. Raises ValueError, with the reason, where the checkpoint is not whole; OSError as the store."""
    manifest = read_manifest(store, name)
    for file, entry in list(manifest.files.items())[reader::readers]:
        size = store.size(f"{name}/{file}")
        if size is None:
            raise ValueError(f"{file} is missing")
        if size != entry.bytes:
            raise ValueError(f"{file} has {size} of {entry.bytes} bytes")
        if checksum(store, f"{name}/{file}", size) != entry:
            raise ValueError(f"{file} is corrupt: its checksum differs")
    return manifest


def checksum(store: Store, path: str, size: int) -> FileEntry:
    """Size and xxh3-64 of a file, read in 16 MiB blocks."""
    digest = xxhash.xxh3_64()
    for start in range(0, size, BLOCK):
        digest.update(store.read(path, start, min(start + BLOCK, size)))
    return FileEntry(size, digest.hexdigest())


def pick(store: Store, which: str) -> str:
    """The name of the `newest` checkpoint, the `best` by validation loss, or that of a step given as text.

    Raises ValueError, naming the steps that there are, where there is no such checkpoint.
    """
    there = list(committed(store))
    if not there:
        raise ValueError("there is no checkpoint yet")
    if which == "newest":
        return there[0][0]
    if which == "best":
        evaluated = [(loss, name) for name, manifest in there if (loss := val_loss_of(manifest)) is not None]
        if not evaluated:
            raise ValueError("no checkpoint was written right after an evaluation; set checkpoint.keep_best")
        return min(evaluated)[1]
    for name, manifest in there:
        if str(manifest.step) == which:
            return name
    steps = ", ".join(str(manifest.step) for _, manifest in there)
    raise ValueError(f"there is no checkpoint of step {which}; there are those of {steps}")


def val_loss_of(manifest: Manifest) -> float | None:
    """The validation loss of the very state that the checkpoint holds, in nats; None where it was not evaluated."""
    progress = manifest.progress
    loss: float | None = progress.get("val_loss") if progress.get("val_step") == manifest.step else None
    return loss
