"""Law 4: what any number of writers wrote is read back in any range, and only whole checkpoints count."""

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from lwray.checkpoint import commit as committing
from lwray.checkpoint import find, write
from lwray.checkpoint.commit import Keep
from lwray.checkpoint.fence import give_up_unfinished
from lwray.checkpoint.find import Found, pick
from lwray.checkpoint.fragment import CODES, Fragment, Part, lay_out, shares, tensor_index
from lwray.checkpoint.manifest import (
    Manifest,
    NewerFormat,
    directory_name,
    encode,
    read_manifest,
)
from lwray.checkpoint.read import Reader
from lwray.checkpoint.retain import retain
from lwray.errors import RunFailed
from lwray.store.local import LocalStore

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DRAWN = st.lists(st.integers(0, 7), max_size=3)


def commit(directory: Path, parts: Sequence[Part], step: int = 0, **progress: object) -> None:
    manifest = Manifest(
        step=step,
        attempt=1,
        time=0.5,
        cause="periodic",
        backend="none",
        workers=len(parts),
        files={part.file: part.entry for part in parts},
        tensors=tensor_index(parts),
        progress={"step": step, **progress},
    )
    assert LocalStore(directory).create("manifest.json", encode(manifest))


def write_part(directory: Path, rank: int, fragments: Sequence[Fragment]) -> Part:
    layout = lay_out(fragments)
    name = f"rank-{rank:05d}.safetensors"
    return Part(name, write.write_part(LocalStore(directory), name, layout.chunks(), read_back=True), layout.pieces)


def write_shared(directory: Path, tensors: dict[str, Tensor], writers: int) -> list[Part]:
    """Every writer holds every tensor and writes its share of all their elements."""
    whole = [Fragment.whole(key, tensor) for key, tensor in tensors.items()]
    sizes = [fragment.data.numel() for fragment in whole]
    return [
        write_part(
            directory,
            rank,
            [
                Fragment(whole[i].key, start, whole[i].data[start:stop], whole[i].shape)
                for i, start, stop in shares(sizes, rank, writers)
            ],
        )
        for rank in range(writers)
    ]


def read(directory: Path) -> Reader:
    return Reader(LocalStore(directory.parent), directory.name)


def find_newest(checkpoints: Path) -> Found:
    store = LocalStore(checkpoints)
    return find.find_newest(find.newest_first(store), lambda name: find.damage(store, name))


def made(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count) % 251).view(tuple(shape)).to(dtype)


@settings(max_examples=40)
@given(
    shapes=st.lists(DRAWN, min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    writers=st.sampled_from([1, 2, 3, 5]),
    data=st.data(),
)
def test_tensors_of_any_shape_and_dtype_from_any_number_of_writers_are_read_whole_and_in_any_range(
    shapes: list[list[int]],
    dtype: torch.dtype,
    writers: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("step")
    tensors = {f"param/{index}.weight": made(shape, dtype) for index, shape in enumerate(shapes)}
    commit(directory, write_shared(directory, tensors, writers))
    reader = read(directory)
    assert sorted(reader.keys("param")) == sorted(f"{index}.weight" for index in range(len(shapes)))
    for key, tensor in tensors.items():
        whole = reader.whole(key)
        assert whole.dtype == dtype
        assert torch.equal(whole, tensor)
        start = data.draw(st.integers(0, tensor.numel()))
        length = data.draw(st.integers(0, tensor.numel() - start))
        assert torch.equal(reader.range(key, start, length), tensor.flatten()[start : start + length])


@settings(max_examples=40)
@given(count=st.integers(1, 40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_writers_may_cut_a_tensor_anywhere(
    count: int, cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As ZeRO partitions do; the parts are told in any order."""
    directory = tmp_path_factory.mktemp("step")
    borders = sorted({0, count, *(min(cut, count) for cut in cuts)})
    tensor = torch.arange(count, dtype=torch.float32)
    parts = [
        write_part(directory, rank, [Fragment("exp_avg/w", start, tensor[start:stop], (count,))])
        for rank, (start, stop) in enumerate(pairwise(borders))
    ]
    commit(directory, parts[::-1])
    reader = read(directory)
    assert torch.equal(reader.whole("exp_avg/w"), tensor)
    for start in range(0, count, 3):
        for stop in range(start, count + 1, 5):
            assert reader.range("exp_avg/w", start, stop - start).tolist() == list(range(start, stop))


def test_a_range_reads_one_scalar_as_well(tmp_path: Path) -> None:
    commit(tmp_path, write_shared(tmp_path, {"buffer/count": torch.tensor(7)}, 3))
    reader = read(tmp_path)
    assert reader.whole("buffer/count").shape == ()
    assert reader.range("buffer/count", 0, 1).tolist() == [7]
    with pytest.raises(KeyError):
        reader.whole("buffer/other")


def test_transposed_tensors_and_views_of_one_flat_buffer_are_written_as_they_read(tmp_path: Path) -> None:
    flat = torch.arange(30, dtype=torch.bfloat16)
    tensors = {
        "param/transposed": torch.arange(12).view(3, 4).t(),
        "param/strided": torch.arange(40)[::4],
        "param/first": flat[:10].view(2, 5),
        "param/second": flat[10:],
    }
    assert not tensors["param/transposed"].is_contiguous()
    commit(tmp_path, write_shared(tmp_path, tensors, 2))
    for key, tensor in tensors.items():
        assert torch.equal(read(tmp_path).whole(key), tensor)


def test_an_integer_of_64_bits_and_a_nan_keep_their_bits(tmp_path: Path) -> None:
    tensors = {"buffer/seed": torch.tensor([2**62 + 1, -(2**63)]), "param/bad": torch.tensor([float("nan"), -0.0])}
    commit(tmp_path, write_shared(tmp_path, tensors, 2))
    reader = read(tmp_path)
    assert torch.equal(reader.whole("buffer/seed"), tensors["buffer/seed"])
    assert torch.equal(reader.whole("param/bad").view(torch.int32), tensors["param/bad"].view(torch.int32))


def pieces_of(directory: Path, *ranges: tuple[int, int], count: int = 10) -> list[Part]:
    tensor = torch.arange(count)
    return [
        write_part(directory, rank, [Fragment("param/w", start, tensor[start:stop], (count,))])
        for rank, (start, stop) in enumerate(ranges)
    ]


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([(0, 4), (6, 10)], "elements 4 to 6"),
        ([(2, 10)], "elements 0 to 2"),
        ([(0, 6), (4, 10)], "elements 6 to 4"),
        ([(0, 10), (0, 10)], "elements 10 to 0"),
        ([(0, 4), (4, 9)], "9 of 10 elements"),
    ],
)
def test_pieces_that_do_not_make_the_whole_are_an_error_before_anything_is_committed(
    tmp_path: Path, ranges: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(ValueError, match=f"param/w: {said}"):
        tensor_index(pieces_of(tmp_path, *ranges))


def test_a_manifest_says_what_was_written_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    parts = write_shared(tmp_path, {"param/w": torch.arange(10.0), "param/none": torch.empty(0, 3)}, 3)
    assert all(not each.name.endswith(".json") for each in tmp_path.iterdir())
    commit(tmp_path, parts, step=9)
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(3))}
    manifest = read_manifest(LocalStore(tmp_path.parent), tmp_path.name)
    assert (manifest.step, manifest.attempt, manifest.progress) == (9, 1, {"step": 9})
    assert [(p.file, p.start, p.length) for p in manifest.tensors["param/w"].pieces] == [
        ("rank-00000.safetensors", 0, 3),
        ("rank-00001.safetensors", 3, 3),
        ("rank-00002.safetensors", 6, 4),
    ]
    assert manifest.bytes == sum((tmp_path / part.file).stat().st_size for part in parts)
    assert json.loads((tmp_path / "manifest.json").read_text())["bytes"] == manifest.bytes


def test_directories_sort_by_step_and_attempt() -> None:
    names = [directory_name(step, attempt) for step in (0, 9, 10, 99_999_999) for attempt in (1, 2, 10)]
    assert names == sorted(names)
    assert directory_name(100, 1) == "step-00000100-0001"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Committed after 10, 20 and 30 updates, by two writers."""
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    return tmp_path


def write_checkpoint(checkpoints: Path, step: int, attempt: int = 1, committed: bool = True) -> Path:
    directory = checkpoints / directory_name(step, attempt)
    directory.mkdir()
    parts = write_shared(directory, {"param/w": torch.full((50,), float(step))}, 2)
    if committed:
        commit(directory, parts, step)
    return directory


def names_of(found: Found) -> tuple[str | None, list[str]]:
    return found.name, [each.name for each in found.skipped]


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def test_the_newest_committed_checkpoint_is_found(checkpoints: Path) -> None:
    found = find_newest(checkpoints)
    assert names_of(found) == ("step-00000030-0001", [])
    assert read(checkpoints / "step-00000030-0001").whole("param/w").tolist() == [30.0] * 50


def test_of_two_attempts_at_a_step_the_later_one_is_newer(checkpoints: Path) -> None:
    write_checkpoint(checkpoints, 30, attempt=2)
    assert names_of(find_newest(checkpoints))[0] == "step-00000030-0002"


def test_where_there_is_none_none_is_found(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "missing") == Found(None, ())
    assert find_newest(tmp_path) == Found(None, ())


PART = "rank-00001.safetensors"


def truncate(path: Path, to: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * to)])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / "manifest.json").unlink(), "no manifest"),
        (lambda d: truncate(d / "manifest.json", 0.0), "manifest cannot be read"),
        (lambda d: truncate(d / "manifest.json", 0.6), "manifest cannot be read"),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest cannot be read"),
        (lambda d: truncate(d / PART, 0.9), rf"{PART} has \d+ of \d+ bytes"),
        (lambda d: flip_bit(d / PART, -1), f"{PART} is corrupt"),
        (lambda d: flip_bit(d / PART, 12), f"{PART} is corrupt"),
        (lambda d: (d / PART).unlink(), f"{PART} is missing"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_with_the_reason(
    checkpoints: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(checkpoints / "step-00000030-0001")
    found = find_newest(checkpoints)
    assert names_of(found) == ("step-00000020-0001", ["step-00000030-0001"])
    assert re.search(reason, found.skipped[0].reason)


def test_any_flipped_bit_of_a_tensor_file_is_seen(checkpoints: Path) -> None:
    path = checkpoints / "step-00000030-0001" / PART
    for at in range(0, path.stat().st_size, 7):
        flip_bit(path, at, at % 8)
        assert names_of(find_newest(checkpoints))[0] == "step-00000020-0001", at
        flip_bit(path, at, at % 8)
    assert names_of(find_newest(checkpoints))[0] == "step-00000030-0001"


def test_any_flipped_bit_of_a_manifest_is_seen(checkpoints: Path) -> None:
    path = checkpoints / "step-00000030-0001" / "manifest.json"
    for at in range(path.stat().st_size):
        for bit in range(8):
            flip_bit(path, at, bit)
            assert names_of(find_newest(checkpoints))[0] == "step-00000020-0001", (at, bit)
            flip_bit(path, at, bit)
    assert names_of(find_newest(checkpoints))[0] == "step-00000030-0001"


def test_all_damaged_ones_are_named_newest_first_and_none_is_found(checkpoints: Path) -> None:
    for directory in checkpoints.iterdir():
        (directory / PART).unlink()
    found = find_newest(checkpoints)
    assert names_of(found) == (None, ["step-00000030-0001", "step-00000020-0001", "step-00000010-0001"])


def test_a_writer_killed_between_its_file_and_the_manifest_leaves_the_one_before(checkpoints: Path) -> None:
    unfinished = write_checkpoint(checkpoints, 40, committed=False)
    (unfinished / "manifest.json.tmp").write_text('{"step": 40')
    found = find_newest(checkpoints)
    assert names_of(found) == ("step-00000030-0001", ["step-00000040-0001"])
    assert found.skipped[0].reason == "no manifest: it was never finished"


def test_a_newer_format_is_refused_by_name_and_never_skipped_for_an_older_checkpoint(checkpoints: Path) -> None:
    path = checkpoints / "step-00000030-0001" / "manifest.json"
    document = json.loads(path.read_text()) | {"format": 7}
    del document["xxh3"]
    path.write_text(json.dumps(document | {"xxh3": xxh3_64_hexdigest(json.dumps(document).encode())}))
    with pytest.raises(NewerFormat, match="it is of format 7, and this version of lwray reads up to 1"):
        find_newest(checkpoints)


def test_a_later_attempt_takes_the_place_of_an_unfinished_one_and_nobody_can_commit_there(checkpoints: Path) -> None:
    unfinished = write_checkpoint(checkpoints, 40, committed=False)
    own = write_checkpoint(checkpoints, 50, attempt=2, committed=False)
    store = LocalStore(checkpoints)
    given_up = give_up_unfinished(store, 2)
    assert [(each.name, each.reason) for each in given_up] == [(unfinished.name, "no manifest: it was never finished")]
    assert [each.name for each in unfinished.iterdir()] == ["manifest.json"]
    assert len(list(own.iterdir())) == 2
    assert not store.create(f"{unfinished.name}/manifest.json", b"{}")
    assert give_up_unfinished(store, 3) == (find.Skipped(own.name, "no manifest: it was never finished"),)
    # given up is said once, and is no damage
    assert names_of(find_newest(checkpoints)) == ("step-00000030-0001", [])
    retain(store, 1, 0, write_checkpoint(checkpoints, 60, attempt=3).name)
    assert remaining(checkpoints) == ["step-00000060-0003"]


def manifest_of(checkpoints: Path, name: str) -> Manifest:
    return read_manifest(LocalStore(checkpoints), name)


def test_a_place_that_is_taken_is_a_commit_only_where_a_whole_checkpoint_of_the_attempt_stands_there(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    attempts = tmp_path_factory.mktemp("attempts")
    (attempts / "0001").mkdir()
    store, started, keep = LocalStore(checkpoints), LocalStore(attempts), Keep(newest=1, best=0)
    name = "step-00000030-0001"
    manifest = manifest_of(checkpoints, name)
    # an earlier process of this attempt had committed it
    assert committing.commit(store, started, manifest, None) is None
    (checkpoints / name / PART).unlink()
    with pytest.raises(OSError, match=f"the place of {name} is taken by another checkpoint that is not whole"):
        committing.commit(store, started, manifest, keep)
    (checkpoints / name / "manifest.json").write_text("torn")
    with pytest.raises(OSError, match=r"the place of \S+ is taken: its manifest cannot be read"):
        committing.commit(store, started, manifest, keep)
    assert len(remaining(checkpoints)) == 3, "nothing is deleted for what was not committed"
    (attempts / "0002").mkdir()
    assert committing.commit(store, started, manifest, keep) == 2
    (attempts / "0001").rmdir()
    (attempts / "0002").rmdir()
    with pytest.raises(OSError, match="holds no attempts any more"):
        committing.commit(store, started, manifest, keep)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["files"].update({"../secret": d["files"][PART]}), "names '../secret'"),
        (lambda d: d["tensors"]["param/w"][2][0].__setitem__(0, "../secret"), "cannot be read"),
        (lambda d: d["tensors"]["param/w"][2].pop(), "places 25 of 50 elements of param/w"),
        (lambda d: d["tensors"]["param/w"][2][1].__setitem__(1, 20), "places param/w wrongly"),
        (lambda d: d["tensors"]["param/w"][2][1].__setitem__(3, 10**6), "places param/w wrongly"),
        (lambda d: d["tensors"]["param/w"].__setitem__(1, "load"), "cannot be read"),
    ],
)
def test_a_manifest_that_no_writer_writes_is_damage(
    checkpoints: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    path = checkpoints / "step-00000030-0001" / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    del document["xxh3"]
    path.write_text(json.dumps(document | {"xxh3": xxh3_64_hexdigest(json.dumps(document).encode())}))
    found = find_newest(checkpoints)
    assert found.name == "step-00000020-0001"
    assert says in found.skipped[0].reason


def test_checkpoints_are_ordered_by_number_however_long(tmp_path: Path) -> None:
    for step, attempt in ((99_999_999, 1), (100_000_000, 1), (100_000_000, 10_000), (100_000_000, 9999)):
        (tmp_path / directory_name(step, attempt)).mkdir()
    assert find.newest_first(LocalStore(tmp_path)) == [
        "step-100000000-10000",
        "step-100000000-9999",
        "step-100000000-0001",
        "step-99999999-0001",
    ]


def test_a_dtype_that_the_format_does_not_have_is_named() -> None:
    with pytest.raises(RunFailed, match=r"buffer/z is of torch.complex128, which a checkpoint cannot hold"):
        lay_out([Fragment.whole("buffer/z", torch.ones(2, dtype=torch.complex128))])


def test_the_best_by_validation_loss_are_kept_beside_the_newest_and_picked(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0)):
        directory = tmp_path / directory_name(step, 1)
        directory.mkdir()
        # the loss of step 30's checkpoint is an earlier state's: it has none of its own
        evaluated = step if step != 30 else 29
        parts = write_shared(directory, {"param/w": torch.ones(3)}, 1)
        commit(directory, parts, step, val_loss=loss, val_step=evaluated)
    store = LocalStore(tmp_path)
    assert pick(store, "best") == "step-00000020-0001"
    assert pick(store, "newest") == "step-00000040-0001"
    assert pick(store, "10") == "step-00000010-0001"
    with pytest.raises(ValueError, match="no checkpoint of step 11; there are those of 40, 30, 20, 10"):
        pick(store, "11")
    retain(store, 1, 2, "step-00000040-0001")
    assert remaining(tmp_path) == ["step-00000010-0001", "step-00000020-0001", "step-00000040-0001"]
    retain(store, 1, 1, "step-00000040-0001")
    assert remaining(tmp_path) == ["step-00000020-0001", "step-00000040-0001"]


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), ranks=st.integers(1, 6))
def test_shares_of_all_ranks_make_every_tensor_once_and_are_of_equal_size(sizes: list[int], ranks: int) -> None:
    held = [list(shares(sizes, rank, ranks)) for rank in range(ranks)]
    for index, size in enumerate(sizes):
        ranges = [(start, stop) for rank in held for i, start, stop in rank if i == index]
        assert [at for start, stop in ranges for at in range(start, stop)] == list(range(size))
        assert ranges
    counts = [sum(stop - start for _, start, stop in rank) for rank in held]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=40)
@given(made_of=st.lists(st.tuples(DRAWN, st.sampled_from(list(CODES))), min_size=1, max_size=5))
def test_a_ranks_file_is_safetensors_to_the_library(
    made_of: list[tuple[list[int], torch.dtype]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("file")
    tensors = {f"t{i}": torch.ones(shape).to(dtype) for i, (shape, dtype) in enumerate(made_of)}
    part = write_part(directory, 0, [Fragment.whole(key, tensor) for key, tensor in tensors.items()])
    loaded = load_file(directory / part.file)
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert loaded[key].view(torch.uint8).equal(tensor.flatten().view(torch.uint8))
        assert all(piece.offset % tensors[piece.key].itemsize == 0 for piece in part.pieces)


def test_the_same_step_is_written_over_what_an_unfinished_attempt_left(checkpoints: Path) -> None:
    unfinished = write_checkpoint(checkpoints, 40, committed=False)
    commit(unfinished, write_shared(unfinished, {"param/w": torch.full((50,), 41.0)}, 2), 40)
    assert read(unfinished).whole("param/w")[0] == 41.0
    assert names_of(find_newest(checkpoints)) == ("step-00000040-0001", [])


def remaining(checkpoints: Path) -> list[str]:
    return sorted(each.name for each in checkpoints.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3, 7])
def test_the_newest_committed_ones_are_kept_and_older_ones_deleted(checkpoints: Path, keep: int) -> None:
    before = remaining(checkpoints)
    removed = retain(LocalStore(checkpoints), keep, 0, "step-00000030-0001")
    assert remaining(checkpoints) == before[-keep:]
    assert sorted(removed) == before[:-keep]
    assert retain(LocalStore(checkpoints), keep, 0, "step-00000030-0001") == []


def test_an_unfinished_one_is_left_while_it_is_newer_and_does_not_count(checkpoints: Path) -> None:
    write_checkpoint(checkpoints, 5, committed=False)
    write_checkpoint(checkpoints, 25, committed=False)
    write_checkpoint(checkpoints, 40, committed=False)
    retain(LocalStore(checkpoints), 2, 0, "step-00000030-0001")
    assert remaining(checkpoints) == [
        "step-00000020-0001",
        "step-00000025-0001",
        "step-00000030-0001",
        "step-00000040-0001",
    ]


def test_a_newer_one_that_was_skipped_as_corrupt_takes_no_place_from_the_one_just_committed(checkpoints: Path) -> None:
    flip_bit(checkpoints / "step-00000030-0001" / PART, -1)
    current = write_checkpoint(checkpoints, 21, attempt=2)
    retain(LocalStore(checkpoints), 1, 0, current.name)
    assert names_of(find_newest(checkpoints)) == ("step-00000021-0002", ["step-00000030-0001"])
