"""What a start goes on from: all ranks look for damage together, and take the same checkpoint."""

from collections.abc import Callable
from typing import Any, TypeVar

from lwray.checkpoint.fence import give_up_unfinished
from lwray.checkpoint.find import Found, Skipped, damage, find_newest, newest_first
from lwray.checkpoint.manifest import NAME, NewerFormat
from lwray.engine.world import World
from lwray.errors import RunFailed
from lwray.store import Store, open_store

T = TypeVar("T")


def newest_checkpoint(checkpoints: str, attempt: int, world: World) -> tuple[Store, Found]:
    """The newest whole checkpoint of a run, after what earlier attempts left unfinished has been given up.

    Each rank reads its share of the files. Raises RunFailed where the storage fails, where a newer lwray has written
    one, and where there are checkpoints and none is whole: a run that has come so far does not begin again in silence.
    """
    store = open_store(checkpoints)
    unfinished, names = together(world, lambda: _given_up_and_left(store, attempt) if world.rank == 0 else ((), []))
    found = find_newest(names, lambda name: damage_seen(store, name, world))
    if found.name is None and found.skipped:
        reasons = "; ".join(f"{skipped.name}: {skipped.reason}" for skipped in found.skipped)
        raise RunFailed(f"No checkpoint of the run is whole ({reasons}). Restore one, or train under another run.name.")
    return store, Found(found.name, (*unfinished, *found.skipped))


def _given_up_and_left(store: Store, attempt: int) -> tuple[tuple[Skipped, ...], list[str]]:
    unfinished = give_up_unfinished(store, attempt)
    # what this very attempt has not finished, before its workers were started again, is no news
    return unfinished, [name for name in newest_first(store) if store.size(f"{name}/{NAME}") is not None]


def damage_seen(store: Store, name: str, world: World) -> str | None:
    """What the lowest rank that found damage says of it; None where none did."""
    everyone = world.gather(together(world, lambda: damage(store, name, world.rank, world.size), mine=True))
    return next((each for each in everyone if each is not None), None)


def together(world: World, read: Callable[[], T], *, mine: bool = False) -> T:
    """What `read` gives on the first rank (or, with `mine`, on this one); RunFailed on all where it fails on any."""
    value: Any = None
    problem = None
    try:
        value = read()
    except NewerFormat as error:
        problem = f"{error}. Go on with the version that wrote it."
    except OSError as error:
        problem = f"{error}. Repair the storage, and run the same command again."
    problems = [each for each in world.gather(problem) if each is not None]
    if problems:
        raise RunFailed(f"The run's checkpoints cannot be read: {problems[0]}")
    result: T = value if mine else world.from_first(value)
    return result
