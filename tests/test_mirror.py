"""Files that grow on one machine, their segments in a store, and what other machines make of them."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwray.store.local import LocalStore
from lwray.tracking import turns
from lwray.tracking.mirror import SEGMENT_BYTES, Mirror
from lwray.tracking.rundir import RunDir
from lwray.tracking.turns import Turns

NAME = Path("attempts/0001/metrics.jsonl")


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], tuple[Mirror, Path]]:
    """`machine(name)`: its mirror, and its copy of one file that grows; all of them share one store."""

    def make(name: str) -> tuple[Mirror, Path]:
        root = tmp_path / name
        (root / NAME).parent.mkdir(parents=True, exist_ok=True)
        return Mirror(RunDir(root, "s3://bucket/run"), LocalStore(tmp_path / "store")), root / NAME

    return make


Make = Callable[[str], tuple[Mirror, Path]]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_reader_has_what_was_pushed_after_each_pull_and_full_segments_stay(machine: Make, tmp_path: Path) -> None:
    (writer, written), (reader, read) = machine("writer"), machine("reader")
    line = b"x" * 9_999 + b"\n"
    for number in range(40):
        append(written, line)
        writer.push(written)
        if number % 3 == 0:
            reader.pull(read)
            assert read.read_bytes() == written.read_bytes()
    reader.pull(read)
    assert read.read_bytes() == written.read_bytes() == 40 * line
    sizes = [path.stat().st_size for path in sorted((tmp_path / "store" / NAME).iterdir())]
    assert len(sizes) == 3
    assert all(SEGMENT_BYTES <= size < SEGMENT_BYTES + len(line) for size in sizes[:-1])
    fresh, copy = machine("fresh")
    fresh.pull(copy)
    assert copy.read_bytes() == 40 * line


def test_a_torn_line_is_not_pushed_before_it_is_whole(machine: Make) -> None:
    (writer, written), (reader, read) = machine("writer"), machine("reader")
    append(written, b"one\ntw")
    writer.push(written)
    reader.pull(read)
    assert read.read_bytes() == b"one\n"
    append(written, b"o\n")
    writer.push(written)
    reader.pull(read)
    assert read.read_bytes() == b"one\ntwo\n"


def test_lines_that_a_lost_machine_never_pushed_give_way_to_those_of_the_next(machine: Make) -> None:
    (old, lost), (new, copy), (driver, seen) = machine("old"), machine("new"), machine("driver")
    append(lost, b"one\n")
    old.push(lost)
    append(lost, b"never pushed\n")
    new.take_over(copy)
    append(copy, b"two\nthree, which is longer\n")
    new.push(copy)
    driver.pull(seen)
    assert seen.read_bytes() == copy.read_bytes() == b"one\ntwo\nthree, which is longer\n"
    # a driver on the lost worker's machine, and a later worker there
    old.pull(lost)
    assert lost.read_bytes() == copy.read_bytes()
    append(lost, b"never pushed either, and longer than what another machine wrote in its place\n")
    again, _ = machine("old")
    again.take_over(lost)
    assert lost.read_bytes().startswith(copy.read_bytes() + b"never pushed")
    append(copy, b"four\n")
    new.push(copy)
    again.take_over(lost)
    assert lost.read_bytes() == copy.read_bytes()


@given(lengths=st.lists(st.tuples(st.integers(0, 200_000), st.booleans(), st.booleans()), max_size=8))
def test_any_interleaving_of_pushes_and_pulls_ends_with_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, bool, bool]]
) -> None:
    root = tmp_path_factory.mktemp("any")
    store = LocalStore(root / "store")
    paths = [root / name / NAME for name in ("writer", "reader")]
    for path in paths:
        path.parent.mkdir(parents=True)
    writer, reader = (Mirror(RunDir(root / name, "s3://bucket/run"), store) for name in ("writer", "reader"))
    for length, pushed, anew in lengths:
        append(paths[0], b"a" * length + b"\n")
        if anew:
            writer = Mirror(RunDir(root / "writer", "s3://bucket/run"), store)
            writer.take_over(paths[0])
        if pushed:
            writer.push(paths[0])
        reader.pull(paths[1])
    writer.push(paths[0])
    reader.pull(paths[1])
    held = [path.read_bytes() if path.exists() else b"" for path in paths]
    assert held[0] == held[1]


def test_a_turn_that_fails_is_said_once_and_made_good(
    machine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (writer, written), (reader, read) = machine("writer"), machine("reader")
    put, down = writer.store.put, True

    def failing(path: str, chunks: list[bytes]) -> None:
        if down:
            raise OSError("Cannot write: on purpose")
        put(path, chunks)

    monkeypatch.setattr(writer.store, "put", failing)
    monkeypatch.setattr(turns, "TURN_S", 0.01)
    append(written, b"one\n")
    kept = Turns(writer, push=[written])
    with caplog.at_level(logging.WARNING):
        asked = kept.ask()
        with pytest.raises(OSError, match="on purpose"):
            kept.settle()
        assert not kept.reached(asked)
        while "on purpose" not in caplog.text:
            kept.ask()
        down = False
        while not kept.reached(asked):
            kept.ask()
        append(written, b"two\n")
        kept.close()
    reader.pull(read)
    assert read.read_bytes() == b"one\ntwo\n"
    assert caplog.text.count("on purpose") == 1
    assert "on this machine alone" not in caplog.text


def test_what_the_last_turn_could_not_push_is_said(
    machine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, written = machine("writer")

    def failing(*_: object) -> None:
        raise OSError("Cannot write: on purpose")

    monkeypatch.setattr(writer.store, "put", failing)
    append(written, b"one\n")
    with caplog.at_level(logging.WARNING):
        Turns(writer, push=[written]).close()
    assert "The last lines of metrics.jsonl are on this machine alone" in caplog.text
