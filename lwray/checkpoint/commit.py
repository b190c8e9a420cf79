"""The one act that makes a checkpoint exist, and what may be deleted after it."""

from contextlib import suppress
from dataclasses import dataclass

from lwray.checkpoint.fence import superseded_by
from lwray.checkpoint.manifest import NAME, Manifest, directory_name, encode, read_manifest
from lwray.checkpoint.retain import retain
from lwray.faults import reach
from lwray.store import Store


@dataclass(frozen=True, slots=True)
class Keep:
    """How many checkpoints outlive a commit."""

    newest: int
    best: int


def commit(store: Store, attempts: Store, manifest: Manifest, keep: Keep | None) -> int | None:
    """Create the manifest and delete what is not kept (nothing, where `keep` is None).

    Returns the number of a later attempt that has taken the run over; it stands on what was committed before it
    began, and on nothing that came after. Raises OSError where the store fails.
    """
    name = directory_name(manifest.step, manifest.attempt)
    later = superseded_by(attempts, manifest.attempt)
    reach("checkpoint.manifest", manifest.step, 0)
    if later is not None:
        return later
    try:
        made = store.create(f"{name}/{NAME}", encode(manifest))
    except FileNotFoundError:
        if superseded_by(attempts, manifest.attempt) is None:
            raise
    if later := superseded_by(attempts, manifest.attempt):
        return later
    if not made:
        _accept(store, name, manifest)
    if keep is not None:
        # what cannot be deleted now is deleted after a later commit; this one stands
        with suppress(OSError):
            retain(store, keep.newest, keep.best, name)
    return None


def _accept(store: Store, name: str, manifest: Manifest) -> None:
    """An earlier process of this very attempt may have committed this step. Raises OSError where it did not."""
    try:
        there = read_manifest(store, name)
    except ValueError as error:
        raise OSError(f"the place of {name} is taken: {error}") from None
    sizes = {file: store.size(f"{name}/{file}") for file in there.files}
    if (there.step, there.attempt) != (manifest.step, manifest.attempt) or any(
        sizes[file] != entry.bytes for file, entry in there.files.items()
    ):
        raise OSError(f"the place of {name} is taken by another checkpoint that is not whole")
