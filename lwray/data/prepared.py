"""A prepared data set on disk: its directory, the manifest `dataset.json`, and what a run needs to know."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lwray.data.shards import Shard, replacing
from lwray.errors import UserError

MANIFEST = "dataset.json"
"""Written last: the data set exists when this does."""

MARKER = "fingerprint.txt"
"""Written first: what the directory is for."""


@dataclass(frozen=True)
class Prepared:
    """Token shards to train on and held-out ones. Bytes are of the text behind the tokens, 0 when unknown."""

    directory: Path
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    vocab_size: int
    train_tokens: int
    val_tokens: int
    train_bytes: int
    val_bytes: int
    tokenizer: Path | None
    fingerprint: str


def is_prepared(directory: Path) -> bool:
    """Whether the directory holds a complete data set."""
    return (directory / MANIFEST).is_file()


def claim(directory: Path, fingerprint: str, *, shared: bool) -> Path:
    """Creates the directory for this data set, or goes on in it; returns its absolute path.

    `shared`: it is named after its fingerprint, so another process may be preparing it. Raises UserError
    if the directory holds something else.
    """
    marker = directory.resolve() / MARKER
    marker.parent.mkdir(parents=True, exist_ok=True)
    if marker.exists():
        if marker.read_text() != fingerprint:
            raise UserError(f"{directory} holds another data set; choose another directory or remove this one")
        return marker.parent
    if not shared and any(marker.parent.iterdir()):
        raise UserError(f"{directory} is not empty and holds no data set; choose a new directory")
    with replacing(marker) as file:
        file.write(fingerprint.encode())
    return marker.parent


def write_manifest(prepared: Prepared) -> Prepared:
    """Makes the data set complete. Paths inside its directory are relative, so that it can be moved."""
    root = prepared.directory
    table = {
        "fingerprint": prepared.fingerprint,
        "vocab_size": prepared.vocab_size,
        "tokenizer": prepared.tokenizer.name if prepared.tokenizer else None,
        "train_bytes": prepared.train_bytes,
        "val_bytes": prepared.val_bytes,
        "train": _listed(prepared.train, root),
        "val": _listed(prepared.val, root),
    }
    with replacing(root / MANIFEST) as file:
        file.write(json.dumps(table, indent=1).encode())
    return prepared


def open_prepared(directory: Path) -> Prepared:
    """Reads a complete data set. Raises UserError where there is none, or where one of its files is gone."""
    if not is_prepared(directory):
        raise UserError(f"{directory} is not a prepared data set: it has no {MANIFEST}; run lwray prepare to its end")
    table = json.loads((directory / MANIFEST).read_text())
    train, val = (_shards(table[side], directory) for side in ("train", "val"))
    return Prepared(
        directory=directory,
        train=train,
        val=val,
        vocab_size=table["vocab_size"],
        train_tokens=sum(map(len, train)),
        val_tokens=sum(map(len, val)),
        train_bytes=table["train_bytes"],
        val_bytes=table["val_bytes"],
        tokenizer=directory / table["tokenizer"] if table["tokenizer"] else None,
        fingerprint=table["fingerprint"],
    )


def _listed(shards: Sequence[Shard], root: Path) -> list[dict[str, Any]]:
    return [
        {
            "path": str(shard.path.relative_to(root) if shard.path.is_relative_to(root) else shard.path),
            "start": shard.start,
            "stop": shard.stop,
        }
        for shard in shards
    ]


def _shards(listed: Sequence[dict[str, Any]], root: Path) -> tuple[Shard, ...]:
    shards = tuple(Shard(root / each["path"], each["start"], each["stop"]) for each in listed)
    gone = [shard.path for shard in shards if not shard.path.is_file()]
    if gone:
        raise UserError(f"{root}: its shard {gone[0]} is gone; put it back, or prepare the data again")
    return shards
