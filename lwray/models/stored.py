"""The tensors of a directory in Hugging Face's layout: safetensors, in one file or in shards with an index."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lwray.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def stored_tensors(directory: Path) -> dict[str, Path]:
    """The file of every tensor, by name. Raises UserError where the directory holds no safetensors."""
    if (directory / INDEX).is_file():
        return _indexed(directory)
    if (directory / SINGLE).is_file():
        with _opened(directory / SINGLE) as file:
            return dict.fromkeys(file.keys(), directory / SINGLE)
    if next(directory.glob("*.bin"), None):
        raise UserError(
            f"{directory} has its weights as pickles (.bin) only, and to read a pickle may run any code; save them as "
            "safetensors with save_pretrained of transformers."
        )
    raise UserError(f"{directory} holds neither {SINGLE} nor {INDEX}.")


def read_tensor(stored: Mapping[str, Path], name: str, shape: Sequence[int]) -> Tensor:
    """The tensor `name` as it is stored. Raises UserError where it is not there or not of this shape."""
    if name not in stored:
        where = next(iter(stored.values())).parent if stored else "The directory"
        raise UserError(f"{where} lacks the tensor {name}.")
    with _opened(stored[name]) as file:
        tensor: Tensor = file.get_tensor(name)
    if tuple(tensor.shape) != tuple(shape):
        raise UserError(f"{stored[name]}: {name} has shape {tuple(tensor.shape)}, by config.json it is {tuple(shape)}.")
    return tensor


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of such a directory. Raises UserError where there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no model in Hugging Face's layout: it has no {path.name}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from None
    return found


def _indexed(directory: Path) -> dict[str, Path]:
    """What the index says, whose files lie beside it."""
    files = read_json(directory / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) and Path(f).name == f for f in files.values()):
        raise UserError(f"{directory / INDEX} has no weight_map from names to files of that directory.")
    return {name: directory / file for name, file in files.items()}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}.") from None
