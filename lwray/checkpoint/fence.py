"""One run, one writer: whoever starts later takes the place of every checkpoint that is not committed yet.

A writer looks for later attempts when all but the manifest is written, and may be frozen between that look and the
commit. A manifest is created exclusively, so a later attempt closes the gap by creating something else in its place.
"""

from contextlib import suppress

from lwray.checkpoint.find import Skipped, newest_first
from lwray.checkpoint.manifest import NAME, encode_given_up, place_of
from lwray.store import Store


def superseded_by(attempts: Store, attempt: int) -> int | None:
    """The number of a later attempt, if there is one: `attempt` has lost the run and must not commit.

    Raises OSError where not even `attempt` is there: the run has been moved, and is about to be another one.
    """
    numbers = [int(name) for name in attempts.names() if name.isdigit()]
    if not numbers:
        raise OSError(f"{attempts.url} holds no attempts any more: the run has been moved or removed")
    last = max(numbers)
    return last if last > attempt else None


def give_up_unfinished(store: Store, attempt: int) -> tuple[Skipped, ...]:
    """Occupy and empty what attempts before `attempt` have not committed; returns it, newest first.

    Called once attempt `attempt` exists and before it looks for the newest checkpoint.
    """
    unfinished = []
    for name in newest_first(store):
        if place_of(name)[1] >= attempt or store.size(f"{name}/{NAME}") is not None:
            continue
        try:
            taken = store.create(f"{name}/{NAME}", encode_given_up(attempt))
        except FileNotFoundError:
            # whoever left it has removed it
            continue
        if taken:
            unfinished.append(Skipped(name, "no manifest: it was never finished"))
            for file in store.names(name):
                # what cannot be removed now goes with the directory, after a later commit
                with suppress(OSError):
                    if file != NAME:
                        store.remove(f"{name}/{file}")
    return tuple(unfinished)
