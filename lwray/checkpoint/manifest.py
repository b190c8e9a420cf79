"""The manifest of a checkpoint: written last, so that a checkpoint exists when its manifest does.

A tensor of the canonical state is named `kind/name` (`param/blocks.0.ff.up.weight`, `exp_avg/…`) and lies,
flattened, in pieces: each writer holds the elements [start, start + length) in a safetensors file of its own.
"""

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from lwray.store import Store

FORMAT = 1
"""A version reads its own format and every older one; a newer one it refuses by name, never skips."""
NAME = "manifest.json"
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""By torch's name: that of the safetensors format (https://github.com/huggingface/safetensors), and bytes."""
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class NewerFormat(ValueError):
    """A later version of lwray wrote the checkpoint."""


class GivenUp(ValueError):
    """A later attempt took the place of a checkpoint that was never finished."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint: its size in bytes and xxh3-64 checksum (hex)."""

    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + length) of a flattened tensor, from byte `offset` of a file on."""

    file: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: shape, dtype (as torch names it, `float32`) and its pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a committed checkpoint holds. `progress` is the run's own state as JSON; `time` is Unix seconds."""

    step: int
    attempt: int
    time: float
    cause: str
    backend: str
    workers: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    progress: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    """Checksums of what the network holds but does not train, by name: not saved, and the same at every start."""
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def directory_name(step: int, attempt: int) -> str:
    """`step-00000100-0001`: sorts by step, then by attempt."""
    return f"step-{step:08d}-{attempt:04d}"


def place_of(name: str) -> tuple[int, int]:
    """(step, attempt) in `step-00000100-0001`, by which checkpoints are ordered."""
    _, step, attempt = name.split("-")
    return int(step), int(attempt)


def encode(manifest: Manifest) -> bytes:
    """The document that `decode` reads; its `xxh3` sums what else stands in it."""
    document = asdict(manifest) | {"bytes": manifest.bytes}
    document["tensors"] = {
        key: [entry.shape, entry.dtype, [[p.file, p.start, p.length, p.offset] for p in entry.pieces]]
        for key, entry in manifest.tensors.items()
    }
    return _signed(document)


def encode_given_up(attempt: int) -> bytes:
    """What stands in a manifest's place so that nobody can commit there; by `attempt`."""
    return _signed({"format": FORMAT, "given_up_by": attempt})


def decode(data: bytes) -> Manifest:
    """Raises ValueError where the manifest is torn or corrupt, NewerFormat or GivenUp where it is that."""
    try:
        raw = json.loads(data)
        if raw.pop("xxh3") != _sum(raw):
            raise ValueError("its manifest is corrupt: its checksum differs")
        if raw["format"] > FORMAT:
            raise NewerFormat(f"it is of format {raw['format']}, and this version of lwray reads up to {FORMAT}")
        if "given_up_by" in raw:
            raise GivenUp(f"it was never finished; attempt {raw['given_up_by']} has given it up")
        raw.pop("bytes")
        raw["files"] = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
        raw["tensors"] = {
            key: TensorEntry(tuple(shape), dtype, tuple(Piece(*piece) for piece in pieces))
            for key, (shape, dtype, pieces) in raw["tensors"].items()
        }
        manifest = Manifest(**raw)
        _check(manifest)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its manifest cannot be read ({error})") from None
    return manifest


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of the checkpoint `name`. Raises as `decode` does, and ValueError where there is none."""
    try:
        data = store.read(f"{name}/{NAME}")
    except FileNotFoundError:
        raise ValueError("no manifest: it was never finished") from None
    return decode(data)


def _check(manifest: Manifest) -> None:
    """Raises ValueError for what no writer writes: a name that leads out of the directory, a tensor with a gap."""
    for name in manifest.files:
        if not FILE.fullmatch(name):
            raise ValueError(f"its manifest names {name!r}, which is no file of a checkpoint")
    for key, entry in manifest.tensors.items():
        end, width = 0, DTYPES[entry.dtype][1]
        for piece in entry.pieces:
            whole = manifest.files[piece.file].bytes
            if piece.start != end or piece.length < 0 or not 0 <= piece.offset <= whole - piece.length * width:
                raise ValueError(f"its manifest places {key} wrongly")
            end += piece.length
        if end != math.prod(entry.shape):
            raise ValueError(f"its manifest places {end} of {math.prod(entry.shape)} elements of {key}")


def _signed(document: dict[str, Any]) -> bytes:
    """As in every format to come: a sum of what else stands in the document, so that damage is told from news."""
    return json.dumps({**document, "xxh3": _sum(document)}).encode()


def _sum(document: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(document).encode())
