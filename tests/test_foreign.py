"""Weights that other programs wrote are read by name and shape, and nothing in their files runs."""

import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from lwray.checkpoint.dcp import METADATA
from lwray.checkpoint.foreign import Weights, fingerprint, fitted, is_foreign, open_foreign


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.bfloat16))


def training_state(net: nn.Module, key: str = "model") -> dict[str, Any]:
    """What a training program saves: network, optimiser, and small things."""
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {key: net.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "rng": torch.get_rng_state()}


def save_dcp(state: dict[str, Any], directory: Path) -> Path:
    with warnings.catch_warnings():
        # it says that it saves from one process
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def as_dcp(state: dict[str, Any], tmp_path: Path) -> Path:
    return save_dcp(state, tmp_path / "dcp")


def as_pt(state: dict[str, Any], tmp_path: Path) -> Path:
    torch.save(state, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def as_old_pth(state: dict[str, Any], tmp_path: Path) -> Path:
    torch.save(state, tmp_path / "state.pth", _use_new_zipfile_serialization=False)
    return tmp_path / "state.pth"


def check(weights: Weights, expected: dict[str, Tensor]) -> None:
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        read = weights.read(name)
        assert read.dtype == tensor.dtype
        assert read.equal(tensor), name


@pytest.mark.parametrize("written", [as_dcp, as_pt, as_old_pth])
@pytest.mark.parametrize("key", ["model", "model_state_dict"])
def test_the_network_is_found_in_a_training_programs_state(
    tmp_path: Path, written: Callable[[dict[str, Any], Path], Path], key: str
) -> None:
    net = network()
    path = written(training_state(net, key), tmp_path)
    assert is_foreign(path)
    check(fitted(open_foreign(path), set(net.state_dict())), net.state_dict())


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    net = network()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    check(open_foreign(tmp_path / "net.safetensors"), net.state_dict())


@pytest.mark.parametrize("root", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model."])
def test_wrappers_are_taken_off_the_names(tmp_path: Path, root: str) -> None:
    net = network()
    path = as_pt({f"{root}{name}": tensor for name, tensor in net.state_dict().items()}, tmp_path)
    check(fitted(open_foreign(path), set(net.state_dict())), net.state_dict())


def test_a_wrapper_inside_a_name_is_taken_out_and_a_name_of_the_network_is_kept() -> None:
    inner = Weights.of({"model.0._orig_mod.weight": torch.ones(1), "model.head.weight": torch.ones(2)})
    assert set(fitted(inner, {"model.0.weight", "model.head.weight"}).shapes) == {"model.0.weight", "model.head.weight"}
    assert set(fitted(inner, {"0.weight", "head.weight"}).shapes) == {"0.weight", "head.weight"}


def test_a_flat_state_leaves_the_optimiser_out_and_shows_what_else_there_is(tmp_path: Path) -> None:
    net = network()
    state = training_state(net)
    flat = {**state.pop("model"), "extra.weight": torch.ones(2), "optimizer": state["optimizer"]}
    found = fitted(open_foreign(save_dcp(flat, tmp_path / "flat")), set(net.state_dict()))
    assert set(found.shapes) == {*net.state_dict(), "extra.weight"}


def write_shards(directory: Path, whole: Tensor) -> None:
    """A tensor in two blocks of columns, as two ranks leave it: DCP's own planner cuts it from a sharded tensor."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    half = whole.shape[1] // 2
    shards = [
        Shard(whole[:, start : start + size].contiguous(), ShardMetadata([0, start], [len(whole), size], "rank:0/cpu"))
        for start, size in ((0, half), (half, whole.shape[1] - half))
    ]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        sharded = ShardedTensor._init_from_local_shards(shards, *whole.shape)
        dcp.save({"w": sharded}, checkpoint_id=directory)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_tensor_in_blocks_is_put_together(tmp_path: Path) -> None:
    whole = torch.arange(35.0).view(5, 7)
    write_shards(tmp_path / "blocks", whole)
    check(open_foreign(tmp_path / "blocks"), {"w": whole})


# what must not run, and what is damaged


class Touch:
    """Pickled, it is a call of os.mkdir."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_that_would_run_code_is_refused_by_name_and_runs_none(tmp_path: Path) -> None:
    directory = as_dcp({"model": network().state_dict()}, tmp_path)
    (directory / METADATA).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"\.metadata was not read: it names (posix|nt)\.mkdir, which is no part"):
        open_foreign(directory)
    assert not (tmp_path / "ran").exists()
    pickle.loads((directory / METADATA).read_bytes())
    assert (tmp_path / "ran").exists(), "a plain unpickler runs it: the test above could fail"


@pytest.mark.parametrize(
    "name", ["builtins eval", "torch load", "torch.serialization load", "functools partial", "torch._dynamo os"]
)
def test_other_callables_are_no_part_of_metadata(tmp_path: Path, name: str) -> None:
    (tmp_path / METADATA).write_bytes(f"c{name.replace(' ', chr(10))}\n.".encode())
    with pytest.raises(ValueError, match=name.replace(" ", r"\.")):
        open_foreign(tmp_path)


def test_getattr_in_metadata_reaches_nothing(tmp_path: Path) -> None:
    """Early versions of Python 3.11 pickle an enumeration by it; it must not become a way to any attribute."""
    size = b"ctorch\nSize\n"
    (tmp_path / METADATA).write_bytes(b"cbuiltins\ngetattr\n(" + size + b"S'__class__'\ntR(" + size + b"tR.")
    with pytest.raises(ValueError, match="cannot be read"):
        open_foreign(tmp_path)


def test_a_pickle_that_would_run_code_is_refused_by_name_and_runs_none(tmp_path: Path) -> None:
    path = as_pt({"model": network().state_dict(), "evil": Touch(tmp_path / "ran")}, tmp_path)
    with pytest.raises(ValueError, match=r"it names (posix|nt)\.mkdir, and to read such a pickle may run any code"):
        open_foreign(path)
    assert not (tmp_path / "ran").exists()


def test_a_block_that_would_run_code_runs_none(tmp_path: Path) -> None:
    directory = as_dcp({"w": torch.ones(3)}, tmp_path)
    [file] = directory.glob("*.distcp")
    evil = io.BytesIO()
    torch.save(Touch(tmp_path / "ran"), evil)
    # the metadata's length is that of the tensor: the archive's end must lie within
    file.write_bytes(evil.getvalue().ljust(file.stat().st_size, b"\0"))
    with pytest.raises(ValueError, match="w cannot be read"):
        open_foreign(directory).read("w")
    assert not (tmp_path / "ran").exists()


def test_a_block_outside_the_directory_is_refused(tmp_path: Path) -> None:
    directory = as_dcp({"w": torch.ones(3)}, tmp_path)
    metadata = (directory / METADATA).read_bytes()
    (directory / METADATA).write_bytes(metadata.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(ValueError, match="outside the directory"):
        open_foreign(directory)


@pytest.mark.parametrize("size", [0, 40, 3000])
def test_cut_files_are_refused(tmp_path: Path, size: int) -> None:
    directory = as_dcp({"model": network().state_dict()}, tmp_path)
    [file] = directory.glob("*.distcp")
    os.truncate(file, size)
    with pytest.raises(ValueError, match=rf"0_0\.distcp has {size} of \d+ bytes"):
        open_foreign(directory)
    os.truncate(directory / METADATA, size // 10)
    with pytest.raises(ValueError, match=r"\.metadata"):
        open_foreign(directory)
    for path in (as_pt(network().state_dict(), tmp_path), tmp_path / "cut.safetensors"):
        save_file(network().state_dict(), tmp_path / "cut.safetensors")
        os.truncate(path, size // 10)
        with pytest.raises(ValueError):
            open_foreign(path)


def test_a_pickle_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tensors by name"):
        open_foreign(as_pt({"step": 3}, tmp_path))


def test_the_fingerprint_sees_every_byte(tmp_path: Path) -> None:
    directory = as_dcp({"w": torch.ones(3)}, tmp_path)
    before = fingerprint(directory)
    assert fingerprint(directory) == before
    [file] = directory.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert fingerprint(directory) != before
