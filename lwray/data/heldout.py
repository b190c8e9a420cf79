"""Which pieces of a text are held out: decided document by document, so that any worker can decide."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import xxhash

MIN_PIECE = 512
MAX_PIECE = 32_768
PIECES_OF_A_SMALL_CORPUS = 200


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One in `every` pieces of at most `piece_chars` characters is held out: 0 means none, 1 means all."""

    piece_chars: int
    every: int


def share_of(val_share: float, total_bytes: int) -> HeldOut:
    """The cut for a share of a corpus; small corpora get small pieces, to have enough to choose from."""
    piece_chars = min(max(total_bytes // PIECES_OF_A_SMALL_CORPUS, MIN_PIECE), MAX_PIECE)
    return HeldOut(piece_chars, max(2, round(1 / val_share)))


def pieces(document: str, limit: int) -> Iterator[str]:
    """Cuts a text at line borders into pieces of at most `limit` characters; a longer line is cut inside."""
    at = 0
    while len(document) - at > limit:
        border = document.rfind("\n", at, at + limit) + 1
        cut = border if border > at else at + limit
        yield document[at:cut]
        at = cut
    if at < len(document):
        yield document[at:]


def runs(document: str, cut: HeldOut) -> Iterator[tuple[bool, str]]:
    """The document as (held out?, text) in its order, neighbouring pieces of one side joined.

    The phase comes from the text itself, so the same document falls on the same side in every file format,
    and a duplicate is never on both sides.
    """
    if cut.every < 2 and document:
        yield cut.every == 1, document
        return
    phase = xxhash.xxh3_64_intdigest(document.encode())
    numbered = enumerate(pieces(document, cut.piece_chars))
    for held, run in groupby(numbered, key=lambda item: (phase + item[0]) % cut.every == 0):
        yield held, "".join(text for _, text in run)
