"""Which checkpoints are kept: the newest and the best up to the one just written, and whatever is newer."""

from lwray.checkpoint.find import newest_first, val_loss_of
from lwray.checkpoint.manifest import NAME, Manifest, place_of, read_manifest
from lwray.store import Store


def retain(store: Store, keep: int, keep_best: int, current: str) -> list[str]:
    """Delete what is neither among the `keep` newest committed nor the `keep_best` best by validation loss; return it.

    What is newer than `current`, just written, was skipped as not whole: it stays and takes no place of one that is.
    """
    older = [name for name in newest_first(store) if place_of(name) <= place_of(current)]
    manifests = {name: manifest for name in older if (manifest := _manifest(store, name)) is not None}
    kept = set(list(manifests)[:keep]) | set(best(manifests, keep_best))
    last = min(list(manifests)[:keep], key=place_of, default=current)
    removed = [name for name in older if name not in kept and (name in manifests or place_of(name) < place_of(last))]
    for name in removed:
        # the manifest goes first: a deletion cut short leaves an unfinished checkpoint, never a torn one
        store.remove(f"{name}/{NAME}")
        store.remove(name)
    return removed


def best(manifests: dict[str, Manifest], count: int) -> list[str]:
    """The `count` names whose state had the lowest validation loss."""
    evaluated = [(loss, name) for name, manifest in manifests.items() if (loss := val_loss_of(manifest)) is not None]
    return [name for _, name in sorted(evaluated)[:count]]


def _manifest(store: Store, name: str) -> Manifest | None:
    try:
        return read_manifest(store, name)
    except ValueError:
        return None
