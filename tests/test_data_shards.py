"""Token shards: what is written is what is read, and windows cover a line of shards."""

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lwray.data.shards import Shard, TokenStream, id_range, whole_shard, write_shard
from lwray.errors import UserError


def stream_of(directory: Path, pieces: list[int], context_text: np.ndarray) -> TokenStream:
    borders = np.cumsum([0, *pieces])
    shards = []
    for index, (start, stop) in enumerate(itertools.pairwise(borders)):
        path = directory / f"{index}.bin"
        # two strange tokens on each side, which the shard's range leaves out
        write_shard(path, np.concatenate([[9, 9], context_text[start:stop], [9, 9]]), 1 << 20)
        shards.append(Shard(path, 2, 2 + int(stop - start)))
    return TokenStream(shards)


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.integers(0, 40), min_size=1, max_size=6), context=st.integers(1, 17))
def test_windows_have_every_token_but_the_first_as_a_target_once_across_shards(
    pieces: list[int], context: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = np.arange(sum(pieces)) + 100
    stream = stream_of(tmp_path_factory.mktemp("shards"), pieces, text)
    count = stream.count_windows(context)
    windows = stream.windows(np.arange(count), context)
    assert windows.shape == (count, context + 1)
    assert windows.dtype == np.int64
    assert windows[:, 1:].ravel().tolist() == text[1 : 1 + count * context].tolist()
    assert windows[:, :-1].ravel().tolist() == text[: count * context].tolist()
    assert 0 <= max(len(text) - 1, 0) - count * context < context


@pytest.mark.parametrize(("vocab_size", "magic", "width"), [(65536, 20240520, 2), (65537, 20240801, 4)])
def test_a_shard_is_written_as_llm_c_writes_it(tmp_path: Path, vocab_size: int, magic: int, width: int) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.array([0, 5, vocab_size - 1]), vocab_size)
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    assert header[:3].tolist() == [magic, 1 if width == 2 else 7, 3]
    assert np.frombuffer(raw[1024:], f"<u{width}").tolist() == [0, 5, vocab_size - 1]
    assert [each.name for each in tmp_path.iterdir()] == ["a.bin"]


def test_npy_and_bin_files_read_the_same(tmp_path: Path) -> None:
    tokens = np.arange(1000) % 300
    write_shard(tmp_path / "a.bin", tokens, 300)
    np.save(tmp_path / "a.npy", tokens.astype(np.uint16))
    for name in ("a.bin", "a.npy"):
        stream = TokenStream([whole_shard(tmp_path / name)])
        assert stream.read(0, len(stream)).tolist() == tokens.tolist()
        assert id_range(whole_shard(tmp_path / name)) == (0, 299)


def test_a_stream_that_was_read_pickles_small(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(100_000) % 7, 512)
    stream = TokenStream([whole_shard(tmp_path / "a.bin")])
    stream.read(0, 100_000)
    packed = pickle.dumps(stream)
    assert len(packed) < 2000
    assert pickle.loads(packed).read(7, 10).tolist() == [0, 1, 2]


def test_reading_outside_the_line_is_an_index_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(10), 512)
    with pytest.raises(IndexError, match="a line of 10"):
        TokenStream([whole_shard(tmp_path / "a.bin")]).read(5, 11)


def test_a_bin_file_without_a_header_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    with pytest.raises(UserError, match=r"raw\.bin has no token header.*256 int32.*\.npy"):
        whole_shard(tmp_path / "raw.bin")


def test_a_bin_file_shorter_than_its_header_says_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(100), 512)
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-2])
    with pytest.raises(UserError, match="says 100 tokens of 2 bytes, but 198 bytes follow"):
        whole_shard(tmp_path / "a.bin")


@pytest.mark.parametrize("array", [np.zeros((3, 3), np.int32), np.zeros(3, np.float32)])
def test_an_npy_file_that_is_no_line_of_integers_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match="one-dimensional and of integers"):
        whole_shard(tmp_path / "a.npy")


def test_an_npy_name_over_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"no array at all")
    with pytest.raises(UserError, match="not a NumPy array"):
        whole_shard(tmp_path / "a.npy")


def test_a_shard_without_tokens_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.zeros(0, np.int64), 512)
    with pytest.raises(UserError, match="holds no tokens"):
        whole_shard(tmp_path / "a.bin")
