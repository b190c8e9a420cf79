"""Weights that something else wrote: safetensors, state dicts of torch.save, torch.distributed.checkpoint."""

import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

BLOCK = 1 << 24
PICKLES = (".pt", ".pth", ".bin")
NESTED = ("model", "model_state_dict", "state_dict", "module")
"""Under which of its keys a training program's file holds the network."""
ROOTS = ("model", "model_state_dict", "state_dict", "module")
"""What a network's names may begin with: the key of a state that holds more than it, or a wrapper."""
INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Wrappers that torch puts in anywhere: torch.compile, FSDP, activation checkpointing."""
OTHER_STATE = ("optim", "optimizer", "optimizers", "optim_state_dict", "optimizer_state_dict", "lr_scheduler")
"""What lies beside a network's names where they have no root of their own."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by name; their shapes are known before one is read. `read` raises ValueError or OSError."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Weights":
        """Of tensors that are there, or mapped."""
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda name: tensors[name])

    def renamed(self, names: Mapping[str, str]) -> "Weights":
        """Those of `names` (ours to theirs) alone, under ours."""
        return Weights(
            {ours: self.shapes[theirs] for ours, theirs in names.items()}, lambda name: self.read(names[name])
        )


def is_foreign(path: Path) -> bool:
    """Whether `open_foreign` knows what this looks like."""
    if path.is_dir():
        return (path / ".metadata").is_file()
    return path.is_file() and path.suffix in (".safetensors", *PICKLES)


def open_foreign(path: Path) -> Weights:
    """A `.safetensors` file, a state dict in a `.pt`, `.pth` or `.bin`, a torch.distributed.checkpoint directory.

    Raises ValueError, with the reason, where it is not whole or would have to run code; OSError.
    """
    if path.is_dir():
        from lwray.checkpoint.dcp import open_dcp

        return open_dcp(path)
    return open_safetensors([path]) if path.suffix == ".safetensors" else Weights.of(_state_dict(path))


def open_safetensors(files: Iterable[Path]) -> Weights:
    """All tensors of safetensors files, mapped. Raises ValueError where one is none."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                tensors |= {name: file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(f"{path.name} cannot be read as safetensors: {error}") from None
    return Weights.of(tensors)


def fitted(weights: Weights, wanted: Collection[str]) -> Weights:
    """`weights` without wrappers and roots in its names, by those that make most of `wanted`; other state left out."""
    plain = {".".join(part for part in name.split(".") if part not in INNER): name for name in weights.shapes}
    under = {
        root: {n.removeprefix(root): theirs for n, theirs in plain.items() if n.startswith(root)}
        for root in sorted(_roots(plain), key=len)
    }
    # of equals the shortest
    root, names = max(under.items(), key=lambda item: len(item[1].keys() & set(wanted)))
    if not root:
        known = {name.partition(".")[0] for name in wanted}
        others = set(OTHER_STATE) - known
        names = {name: theirs for name, theirs in names.items() if name.partition(".")[0] not in others}
    return weights.renamed(names)


def fingerprint(path: Path) -> str:
    """xxh3-64 (hex) of every byte that weights are read from."""
    suffixes = (".json", ".safetensors", ".distcp")
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and (p.name == ".metadata" or p.suffix in suffixes))
    digest = xxhash.xxh3_64()
    for each in files:
        digest.update(f"{each.name}\0{each.stat().st_size}\0".encode() if path.is_dir() else b"")
        with each.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _roots(names: Iterable[str]) -> set[str]:
    """Every prefix of `names` that consists of ROOTS, and none."""
    found = {""}
    for name in names:
        root = ""
        for part in name.split(".")[:-1]:
            if part not in ROOTS:
                break
            root += f"{part}."
            found.add(root)
    return found


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors by name in what torch.save wrote, mapped where the file can be."""
    try:
        # the format before torch 1.6 is no archive, and only that can be mapped
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {named[1]}" if named else "it is more than tensors"
        raise ValueError(f"{what}, and to read such a pickle may run any code; save model.state_dict()") from None
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"torch.load cannot read it ({' '.join(str(error).split())[:200]})") from None
    nested = [found[key] for key in NESTED if key in found] if isinstance(found, Mapping) else []
    for each in (*nested, found):
        if isinstance(each, Mapping) and any(isinstance(value, Tensor) for value in each.values()):
            return {str(name): value for name, value in each.items() if isinstance(value, Tensor)}
    raise ValueError(f"it holds no tensors by name, neither itself nor under {', '.join(NESTED)}")
