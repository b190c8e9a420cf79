"""From what the user names to units of work: the same units for the same source, whoever reads them."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from lwray.config.schema import DataSection
from lwray.data.files import JSONL, PARQUET, STDLIB, find_files, names_tokens, stdlib_files, suffix_of
from lwray.data.parts import HubPart, JsonlPart, ParquetPart, Part, TextPart, load_hub, named
from lwray.data.prepared import is_prepared
from lwray.errors import UserError

T = TypeVar("T")
Kind = Literal["text", "tokens", "prepared"]

HUB = re.compile(r"(?:hf://)?(?P<name>[^:@]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")

PART_BYTES = 4 << 20
SMALLEST_PART = 64 << 10
MOST_UNITS = 2048
HUB_SAMPLE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Unit:
    """Neighbouring parts that are tokenised together, into one shard."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of text, roughly."""
        return sum(part.size for part in self.parts)


def documents(unit: Unit) -> Iterator[str]:
    """The unit's texts in their order. Raises UserError on what cannot be read."""
    for part in unit.parts:
        yield from part.documents()


def kind_of(names: Sequence[str], data: DataSection) -> Kind:
    """What the names are: by `data.format`, or by the names themselves if that is auto."""
    if data.format != "auto":
        return "prepared" if data.format == "prepared" else "tokens" if data.format == "tokens" else "text"
    if any(is_prepared(Path(name).expanduser()) for name in names):
        return "prepared"
    are_tokens = [names_tokens(name) for name in names]
    if any(are_tokens) and not all(are_tokens):
        raise UserError(f"data.source mixes token shards and text: {named(names)}; prepare the text first")
    return "tokens" if all(are_tokens) and names else "text"


def token_files(names: Sequence[str]) -> list[Path]:
    """The shard files that the names stand for, in order. Raises UserError where there is none."""
    return [path for name in names for path in find_files(name, "tokens")]


def find_units(names: Sequence[str], data: DataSection, max_bytes: int = 0) -> tuple[Unit, ...]:
    """Units of about 4 MiB (more in a corpus above 8 GiB), a pure function of what the names hold.

    `max_bytes` above 0 keeps parts evenly spread over the source that total about so many bytes.
    Raises UserError where a name matches nothing, a file is empty, or a column is missing.
    """
    if not names:
        raise UserError("data.source is empty; name files, directories, hf://NAME or python:stdlib")
    step = min(PART_BYTES, max(max_bytes // 16, SMALLEST_PART)) if max_bytes else PART_BYTES
    parts = [part for name in names for part in _parts(name, data, step)]
    if not parts:
        raise UserError(f"{named(names)} holds no text; correct data.source or data.val_source")
    total = sum(part.size for part in parts)
    if 0 < max_bytes < total:
        parts = list(thin(parts, lambda part: part.size, max_bytes / total)) or [parts[len(parts) // 2]]
    return tuple(_grouped(parts, max(PART_BYTES, sum(part.size for part in parts) // MOST_UNITS)))


def thin(items: Iterable[T], size: Callable[[T], int], share: float) -> Iterator[T]:
    """Keeps items evenly spread over the line, that together have about `share` of its size."""
    seen = kept = 0
    for item in items:
        seen += size(item)
        if kept + size(item) / 2 <= share * seen:
            kept += size(item)
            yield item


def _grouped(parts: Sequence[Part], unit_bytes: int) -> Iterator[Unit]:
    group: list[Part] = []
    gathered = 0
    for part in parts:
        if group and gathered + part.size > unit_bytes:
            yield Unit(tuple(group))
            group, gathered = [], 0
        group.append(part)
        gathered += part.size
    if group:
        yield Unit(tuple(group))


def _parts(name: str, data: DataSection, step: int) -> Iterator[Part]:
    if name.startswith("hf://") or data.format == "hf":
        yield from _hub_parts(name, data.text_key, step)
    elif name == STDLIB:
        for path in stdlib_files():
            yield from (TextPart(path, *span, skip_other_encodings=True) for span in _spans(path, step))
    else:
        for path in find_files(name, data.format):
            yield from _file_parts(path, data, step)


def _file_parts(path: Path, data: DataSection, step: int) -> Iterator[Part]:
    if data.format == "parquet" or (data.format == "auto" and path.suffix in PARQUET):
        yield from _parquet_parts(path, data.text_key, step)
    elif data.format == "jsonl" or (data.format == "auto" and suffix_of(path) in JSONL):
        # a gzip stream can only be read from its beginning
        spans = [(0, path.stat().st_size)] if path.suffix == ".gz" else _spans(path, step)
        yield from (JsonlPart(path, *span, data.text_key) for span in spans)
    else:
        yield from (TextPart(path, *span) for span in _spans(path, step))


def _spans(path: Path, step: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of about `step` that begin and end at line borders."""
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start < size:
            file.seek(min(start + step, size))
            file.readline()
            yield start, file.tell()
            start = file.tell()


def _parquet_parts(path: Path, key: str, step: int) -> Iterator[ParquetPart]:
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}") from None
    if key not in schema.names:
        raise UserError(f"{path} has no column {key!r}; set data.text_key to one of its columns: {named(schema.names)}")
    kind = schema.field(key).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{path}: column {key!r} is {kind}, not text; set data.text_key to a column of text")
    sizes = [_column_bytes(metadata.row_group(index), key) for index in range(metadata.num_row_groups)]
    start = 0
    for stop in range(1, len(sizes) + 1):
        size = sum(sizes[start:stop])
        if size >= step or stop == len(sizes):
            yield ParquetPart(path, start, stop, key, size)
            start = stop


def _column_bytes(group: Any, key: str) -> int:
    columns = (group.column(index) for index in range(group.num_columns))
    return next(int(column.total_uncompressed_size) for column in columns if column.path_in_schema == key)


def _hub_parts(name: str, key: str, step: int) -> Iterator[HubPart]:
    match = HUB.fullmatch(name)
    if match is None:
        raise UserError(f"data.source {name!r} is not hf://NAME, hf://NAME:CONFIG or either with @SPLIT")
    hub, config, split = match["name"], match["config"], match["split"] or "train"
    # workers have another working directory
    hub = str(Path(hub).resolve()) if Path(hub).is_dir() else hub
    data = load_hub(hub, config, split)
    if key not in data.column_names:
        raise UserError(
            f"{name} has no column {key!r}; set data.text_key to one of its columns: {named(data.column_names)}"
        )
    if getattr(data.features[key], "dtype", None) not in ("string", "large_string"):
        raise UserError(
            f"{name}: column {key!r} is {data.features[key]}, not text; set data.text_key to a column of text"
        )
    if not len(data):
        raise UserError(f"{name}@{split} has no rows")
    sample = data.select_columns([key])[:: max(1, len(data) // HUB_SAMPLE_ROWS)][key]
    row_bytes = max(1, sum(len((text or "").encode()) for text in sample) // len(sample))
    rows = max(1, step // row_bytes)
    for start in range(0, len(data), rows):
        stop = min(start + rows, len(data))
        yield HubPart(hub, config, split, start, stop, key, (stop - start) * row_bytes)
