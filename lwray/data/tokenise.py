"""One unit of text becomes its shards: what a worker of `prepare` runs, in any process."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lwray.data.heldout import HeldOut, runs
from lwray.data.shards import replacing, token_dtype, write_shard
from lwray.data.sources import Unit, documents
from lwray.data.tokenizer import saved_tokenizer

TOKENIZER = "tokenizer.json"
BATCH_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """One unit to tokenise, and all that a worker needs for it."""

    index: int
    unit: Unit
    cut: HeldOut
    directory: Path
    eot: int
    vocab_size: int

    @property
    def record(self) -> Path:
        """The unit's counts, written last: it is done when this exists."""
        return self.directory / "units" / f"{self.index:05d}.json"

    def shard(self, side: str) -> Path:
        """Where the unit's tokens of one side go."""
        return self.directory / f"{side}-{self.index:05d}.bin"

    def counts(self) -> "Counts":
        """What the unit came to. Raises FileNotFoundError while it is not done."""
        return Counts(**json.loads(self.record.read_text()))


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a unit, and the bytes of UTF-8 text behind them."""

    train_tokens: int
    val_tokens: int
    train_bytes: int
    val_bytes: int


def tokenise_unit(work: Work) -> None:
    """Writes the unit's shards, then its counts. Raises UserError on text that cannot be read."""
    tokenizer = saved_tokenizer(work.directory / TOKENIZER, work.eot)
    end = np.array([work.eot], dtype=np.uint32)
    gathered: dict[bool, list[NDArray[Any]]] = {False: [], True: []}
    text_bytes = {False: 0, True: 0}
    for batch in _batches(_runs_of(work)):
        for (held, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            gathered[held].append(np.concatenate([ids, end]).astype(token_dtype(work.vocab_size)))
            text_bytes[held] += len(text.encode())
    train_tokens = _write_side(work, "train", gathered[False])
    val_tokens = _write_side(work, "val", gathered[True])
    with replacing(work.record) as file:
        counts = Counts(train_tokens, val_tokens, train_bytes=text_bytes[False], val_bytes=text_bytes[True])
        file.write(json.dumps(asdict(counts)).encode())


def _write_side(work: Work, side: str, texts: Sequence[NDArray[Any]]) -> int:
    if not texts:
        return 0
    tokens = np.concatenate(texts)
    write_shard(work.shard(side), tokens, work.vocab_size)
    return len(tokens)


def _runs_of(work: Work) -> Iterator[tuple[bool, str]]:
    for document in documents(work.unit):
        yield from runs(document, work.cut)


def _batches(texts: Iterable[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    """Groups of about a million characters: enough for every core, and few enough to hold as Python lists."""
    batch: list[tuple[bool, str]] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text[1])
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
