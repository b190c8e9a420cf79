"""Parts of a source and how each is read: a stretch of a file, Parquet row groups, rows of a hub data set."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import pyarrow.parquet as pq

from lwray.errors import UserError


class Part(Protocol):
    """A piece of work that can be sent to another process and read there."""

    @property
    def size(self) -> int:
        """Bytes of text, roughly where the format does not say."""
        ...

    def documents(self) -> Iterator[str]:
        """The texts in their order. Raises UserError on what cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class TextPart:
    """Bytes [start, stop) of a text file, cut at line borders: one document."""

    path: Path
    start: int
    stop: int
    skip_other_encodings: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start

    def documents(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            raw = file.read(self.size)
        try:
            text = decode(raw, self.path, self.start)
        except UserError:
            if self.skip_other_encodings:
                return
            raise
        yield text


@dataclass(frozen=True, slots=True)
class JsonlPart:
    """Lines in bytes [start, stop) of a JSONL file, each an object with a text; `.gz` is always whole."""

    path: Path
    start: int
    stop: int
    text_key: str

    @property
    def size(self) -> int:
        return self.stop - self.start

    def documents(self) -> Iterator[str]:
        for number, (offset, raw) in enumerate(self._lines()):
            if raw.strip():
                text = decode(raw, self.path, offset)
                yield self._text_of(text, number)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        packed = self.path.suffix == ".gz"
        try:
            with gzip.open(self.path) if packed else self.path.open("rb") as opened:
                file = cast("BinaryIO", opened)
                file.seek(self.start)
                offset = self.start
                for raw in file:
                    if offset >= self.stop and not packed:
                        return
                    yield offset, raw
                    offset += len(raw)
        except (gzip.BadGzipFile, EOFError) as error:
            raise UserError(f"{self.path} is not a whole gzip file: {error}") from None

    def _text_of(self, line: str, number: int) -> str:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{self._place(number)} is not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(row, dict):
            raise UserError(f"{self._place(number)} is not a JSON object but {type(row).__name__}")
        if self.text_key not in row:
            raise UserError(
                f"{self._place(number)} has no {self.text_key!r}; set data.text_key to one of its keys: {named(row)}"
            )
        if not isinstance(row[self.text_key], str):
            raise UserError(
                f"{self._place(number)}: {self.text_key!r} is {type(row[self.text_key]).__name__}, not text"
            )
        text = cast("str", row[self.text_key])
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{self._place(number)}: {self.text_key!r} has half a surrogate pair "
                f"at character {error.start}; remove it"
            ) from None
        return text

    def _place(self, number: int) -> str:
        before = 0
        if self.start:
            with self.path.open("rb") as file:
                before = file.read(self.start).count(b"\n")
        return f"{self.path}, line {before + number + 1}"


@dataclass(frozen=True, slots=True)
class ParquetPart:
    """Row groups [start, stop) of a Parquet file."""

    path: Path
    start: int
    stop: int
    text_key: str
    size: int

    def documents(self) -> Iterator[str]:
        with pq.ParquetFile(self.path) as file:
            groups = list(range(self.start, self.stop))
            for batch in file.iter_batches(1024, row_groups=groups, columns=[self.text_key]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)


@dataclass(frozen=True, slots=True)
class HubPart:
    """Rows [start, stop) of a data set that `datasets` loads."""

    name: str
    config: str | None
    split: str
    start: int
    stop: int
    text_key: str
    size: int

    def documents(self) -> Iterator[str]:
        rows = load_hub(self.name, self.config, self.split).select_columns([self.text_key])
        yield from (text for text in rows[self.start : self.stop][self.text_key] if text is not None)


@lru_cache(maxsize=4)
def load_hub(name: str, config: str | None, split: str) -> Any:
    """A `datasets.Dataset` from the hub or from a local directory. Raises UserError where there is none."""
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"hf://{name}{f':{config}' if config else ''}@{split} cannot be loaded: {reason}") from error


def decode(raw: bytes, path: Path, offset: int) -> str:
    """UTF-8 text of bytes that start at `offset` of a file. Raises UserError on anything else."""
    if b"\0" in raw:
        raise UserError(f"{path} is a binary file (a zero byte at {offset + raw.index(0)}); name text files only")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 at byte {offset + error.start}; convert it, such as by iconv -t UTF-8"
        ) from None


def named(keys: Any) -> str:
    """Keys or columns as a message lists them."""
    return ", ".join(repr(key) for key in keys) or "none"
