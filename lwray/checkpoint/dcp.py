"""Tensors of a torch.distributed.checkpoint directory, read without that library: its `.metadata` is a pickle.

Only names that such metadata consists of are admitted, and all of them become inert records: nothing of the file runs.
"""

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwray.checkpoint.foreign import Weights

METADATA = ".metadata"

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
RECORDS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "MetadataIndex",
            "StorageMeta",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "Path")),
    # how Python 3.11.0 to 3.11.3 pickle a member of an enumeration; the record takes its place too
    ("builtins", "getattr"),
}


class Record:
    """What the pickle says of an object: `state`, its attributes; what it was called with is left alone."""

    state: Any = None

    def __new__(cls, *_: Any) -> "Record":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class MetadataUnpickler(pickle.Unpickler):
    """Raises UnpicklingError at any name that is not a part of such metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in RECORDS:
            return Record
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor: where it begins in the tensor, its sizes, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """The first byte in the file."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def open_dcp(directory: Path) -> Weights:
    """Raises ValueError where it is cut short, its metadata names what it must not, or a decoder is needed; OSError."""
    data = (directory / METADATA).read_bytes()
    try:
        entries = _entries(MetadataUnpickler(io.BytesIO(data)).load().state)
    except pickle.UnpicklingError as error:
        raise ValueError(f"its {METADATA} was not read: {error}") from None
    except (EOFError, ImportError, LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"its {METADATA} cannot be read ({type(error).__name__}: {error})") from None
    ends: dict[str, int] = {}
    for chunk in (chunk for entry in entries.values() for chunk in entry.chunks):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.bytes)
    for name, end in ends.items():
        size = (directory / name).stat().st_size
        if size < end:
            raise ValueError(f"{name} has {size} of {end} bytes")
    shapes = {name: entry.shape for name, entry in entries.items()}
    return Weights(shapes, lambda name: _read(directory, name, entries[name]))


def _entries(metadata: Mapping[str, Any]) -> dict[str, Entry]:
    places = {}
    for index, info in metadata["storage_data"].items():
        places[index.state["fqn"], tuple(index.state.get("offset") or ())] = info.state
    found = {}
    for name, record in metadata["state_dict_metadata"].items():
        state = record.state or {}
        # whatever is no tensor has no chunks
        if "chunks" in state:
            chunks = tuple(_chunk(name, chunk.state, places) for chunk in state["chunks"])
            dtype = state["properties"].state[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} has no dtype")
            found[name] = Entry(tuple(state["size"]), dtype, chunks)
    return found


def _chunk(name: str, state: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    offsets = tuple(state["offsets"])
    # the first block of a tensor that was not sharded may be named without its offset
    info = places.get((name, offsets)) or places[name, ()]
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} was written through {', '.join(info['transform_descriptors'])}: save it without")
    file = str(info["relative_path"])
    if Path(file).name != file:
        raise ValueError(f"{name} lies in {file}, outside the directory")
    return Chunk(offsets, tuple(state["sizes"]), file, int(info["offset"]), int(info["length"]))


def _read(directory: Path, name: str, entry: Entry) -> Tensor:
    inside = all(o + n <= s for c in entry.chunks for o, n, s in zip(c.offsets, c.sizes, entry.shape, strict=True))
    if not inside or sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.shape):
        raise ValueError(f"the blocks of {name} do not make {list(entry.shape)}")
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for chunk in entry.chunks:
        with (directory / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            data = file.read(chunk.bytes)
        try:
            block = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"{chunk.file}: {name} cannot be read ({type(error).__name__})") from error
        if not isinstance(block, Tensor) or tuple(block.shape) != chunk.sizes:
            raise ValueError(f"{chunk.file}: {name} is not the tensor that {METADATA} describes")
        whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = block
    return whole
