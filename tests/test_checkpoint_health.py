"""What is said of a checkpoint that cannot be read, or that a run deletes while it is looked at."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

from lwray.checkpoint.health import checkpoints
from lwray.checkpoint.manifest import Manifest, directory_name, encode, encode_given_up
from lwray.checkpoint.write import write_part
from lwray.store import Store
from lwray.store.local import LocalStore


def write(store: Store, step: int) -> str:
    """A checkpoint of one file by one worker, evaluated one step before."""
    name = directory_name(step, 1)
    entry = write_part(store, f"{name}/rank-00000-5f0a1c2d.safetensors", [b"tensors"], read_back=False)
    progress = {"step": step, "val_loss": 2.5, "val_step": step - 1}
    files = {"rank-00000-5f0a1c2d.safetensors": entry}
    store.create(f"{name}/manifest.json", encode(Manifest(step, 1, 0.5, "best", "ddp", 2, files, {}, progress)))
    return name


def health(store: Store, *, verify: bool = False) -> dict[str, str]:
    return {row.name: row.health for row in checkpoints(store, verify=verify)}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Steps 10, 20 and 30."""
    store = LocalStore(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        write(store, step)
    return store


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoints(LocalStore(tmp_path / "checkpoints"), verify=True) == []


def test_what_a_manifest_tells_is_told_and_a_loss_of_another_state_is_not(store: LocalStore) -> None:
    assert asdict(checkpoints(store, verify=False)[0]) == {
        "name": "step-00000010-0001",
        "step": 10,
        "attempt": 1,
        "health": "not verified",
        "reason": None,
        "time": 0.5,
        "bytes": 7,
        "backend": "ddp",
        "workers": 2,
        "cause": "best",
        "val_loss": None,
    }


@pytest.mark.parametrize("verify", [False, True])
def test_each_that_cannot_be_used_says_why_and_only_damage_is_damage(store: LocalStore, verify: bool) -> None:
    newer = json.loads(store.read("step-00000010-0001/manifest.json")) | {"format": 7}
    del newer["xxh3"]
    newer["xxh3"] = xxh3_64_hexdigest(json.dumps(newer).encode())
    store.put("step-00000010-0001/manifest.json", [json.dumps(newer).encode()])
    store.put("step-00000020-0001/manifest.json", [b"{"])
    store.put("step-00000040-0001/manifest.json", [encode_given_up(2)])
    store.put("step-00000050-0002/rank-00000-5f0a1c2d.safetensors", [b"half"])
    # a directory in its place: the store fails
    store.put("step-00000060-0002/manifest.json/file", [b""])
    rows = checkpoints(store, verify=verify)
    assert [(row.step, row.health) for row in rows] == [
        (10, "newer format"),
        (20, "manifest unreadable"),
        (30, "whole" if verify else "not verified"),
        (40, "given up"),
        (50, "unfinished"),
        (60, "unknown"),
    ]
    assert [row.step for row in rows if row.damaged] == [20]
    assert rows[0].reason == "it is of format 7, and this version of lwray reads up to 1"


class Failing(LocalStore):
    """A store that gives manifests, and fails in the middle of what is larger."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if not path.endswith("manifest.json"):
            raise OSError(5, "Input/output error", path)
        return super().read(path, start, stop)


def test_a_store_that_does_not_answer_says_nothing_about_what_lies_there(store: LocalStore) -> None:
    rows = checkpoints(Failing(store.root), verify=True)
    assert {row.health for row in rows} == {"unknown"}
    assert not any(row.damaged for row in rows)
    assert "Input/output error" in str(rows[0].reason)


class Retaining(LocalStore):
    """A store in which a run deletes a checkpoint, the manifest first, as soon as its manifest has been read."""

    def __init__(self, root: Path, name: str, *, whole: bool) -> None:
        super().__init__(root)
        self.name, self.whole = name, whole

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().read(path, start, stop)
        if path == f"{self.name}/manifest.json":
            self.remove(path)
            self.remove(self.name if self.whole else f"{self.name}/rank-00000-5f0a1c2d.safetensors")
        return data


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_run_deletes_meanwhile_is_not_called_damaged(store: LocalStore, whole: bool) -> None:
    retaining = Retaining(store.root, "step-00000010-0001", whole=whole)
    found = health(retaining, verify=True)
    assert found.pop("step-00000010-0001", None) == (None if whole else "unfinished")
    assert set(found.values()) == {"whole"}


def test_a_wrong_byte_is_seen_only_where_all_are_read(store: LocalStore) -> None:
    assert set(health(store, verify=True).values()) == {"whole"}
    store.put("step-00000030-0001/rank-00000-5f0a1c2d.safetensors", [b"tensorS"])
    assert health(store, verify=True)["step-00000030-0001"] == "damaged"
    assert health(store)["step-00000030-0001"] == "not verified"
