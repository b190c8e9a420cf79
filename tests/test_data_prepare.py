"""Preparing a data set: the same bytes every time, nothing done twice, clear words where it cannot be."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lwray.config.schema import DataSection
from lwray.data.prepare import Prepared, Work, open_prepared, prepare, serially
from lwray.data.shards import TokenStream, id_range, write_shard
from lwray.data.tokenizer import load_tokenizer
from lwray.errors import UserError

DOCUMENTS = [f"Part {n}.\n" + "".join(f"{n} has {n * m % 97} of {m}.\n" for m in range(40)) for n in range(150)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """150 files of about 800 bytes, in units of about 10 kB."""
    monkeypatch.setattr("lwray.data.sources.PART_BYTES", 10_000)
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / f"corpus/{number:03d}.txt").write_text(text)
    return tmp_path / "corpus"


def section(*source: Path | str, **keys: object) -> DataSection:
    return DataSection(source=[str(each) for each in source], **{"vocab_size": 300, **keys})


def everything(prepared: Prepared) -> dict[str, bytes]:
    root = prepared.directory
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def texts(prepared: Prepared, side: str) -> list[str]:
    """The documents of one side, decoded."""
    assert prepared.tokenizer is not None
    stream = TokenStream(getattr(prepared, side))
    whole = load_tokenizer(prepared.tokenizer).decode(stream.read(0, len(stream)).tolist())
    assert whole.endswith("<|endoftext|>")
    return whole.split("<|endoftext|>")[:-1]


def never(task: Callable[[Work], None], works: Sequence[Work]) -> None:
    raise AssertionError("a complete data set was prepared again")


def test_every_document_lands_once_on_one_side_or_cut_between_them(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare(section(corpus, val_share=0.1), tmp_path / "cache")
    train, val = texts(prepared, "train"), texts(prepared, "val")
    assert sorted("".join(train + val)) == sorted("".join(DOCUMENTS))
    assert prepared.train_bytes == sum(len(text.encode()) for text in train)
    assert prepared.val_bytes == sum(len(text.encode()) for text in val)
    assert prepared.val_bytes == pytest.approx(0.1 * (prepared.val_bytes + prepared.train_bytes), rel=0.5)
    assert not set(train) & set(val)
    assert (prepared.train_tokens, prepared.val_tokens) == (
        len(TokenStream(prepared.train)),
        len(TokenStream(prepared.val)),
    )
    assert max(id_range(shard)[1] for shard in prepared.train) < prepared.vocab_size == 300


def test_preparing_again_does_nothing_and_elsewhere_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    first = prepare(section(corpus), tmp_path / "cache")
    assert prepare(section(corpus), tmp_path / "cache", never) == first
    assert open_prepared(first.directory) == first
    assert first.directory == tmp_path / "cache" / first.fingerprint[:16]

    def backwards(task: Callable[[Work], None], works: Sequence[Work]) -> None:
        serially(task, works[::-1])

    other = prepare(section(corpus), tmp_path / "elsewhere", backwards)
    assert everything(other) == everything(first)
    assert len(first.train) > 10


def test_a_stopped_preparation_goes_on_with_the_units_that_are_missing(corpus: Path, tmp_path: Path) -> None:
    whole = prepare(section(corpus), tmp_path / "whole")
    done: list[int] = []

    def stops_after_four(task: Callable[[Work], None], works: Sequence[Work]) -> None:
        for work in works[:4]:
            task(work)
            done.append(work.index)
        raise KeyboardInterrupt

    def goes_on(task: Callable[[Work], None], works: Sequence[Work]) -> None:
        done.extend(work.index for work in works)
        serially(task, works)

    with pytest.raises(KeyboardInterrupt):
        prepare(section(corpus), tmp_path / "cache", stops_after_four)
    again = prepare(section(corpus), tmp_path / "cache", goes_on)
    assert done == sorted(set(done))
    assert everything(again) == everything(whole)


@pytest.mark.parametrize(
    "change", [{"vocab_size": 290}, {"tokenizer": "bytes"}, {"val_share": 0.3}, {"max_bytes": 30_000}]
)
def test_another_setting_is_another_data_set(change: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    one = prepare(section(corpus), tmp_path / "cache")
    assert prepare(section(corpus, **change), tmp_path / "cache").fingerprint != one.fingerprint


def test_a_changed_word_is_another_data_set_and_a_moved_source_is_not(corpus: Path, tmp_path: Path) -> None:
    one = prepare(section(corpus), tmp_path / "cache")
    moved = corpus.rename(tmp_path / "moved")
    assert prepare(section(moved), tmp_path / "cache", never).fingerprint == one.fingerprint
    (moved / "077.txt").write_text(DOCUMENTS[77].replace("Part", "Bart"))
    assert prepare(section(moved), tmp_path / "cache").fingerprint != one.fingerprint


def test_every_format_gives_the_same_tokens_for_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub-cache"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "hub").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / f"texts/{number:03d}.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "hub/train.parquet")
    held = str(tmp_path / "texts/003.txt")

    def tokens(*source: Path | str, **keys: object) -> tuple[list[int], list[int]]:
        prepared = prepare(section(*source, val_source=held, **keys), tmp_path / "cache")
        streams = TokenStream(prepared.train), TokenStream(prepared.val)
        return streams[0].read(0, len(streams[0])).tolist(), streams[1].read(0, len(streams[1])).tolist()

    train, val = tokens(tmp_path / "texts")
    assert tokens(tmp_path / "a.jsonl") == (train, val)
    assert tokens(tmp_path / "a.parquet") == (train, val)
    assert tokens(f"hf://{tmp_path}/hub") == (train, val)
    np.save(tmp_path / "a.npy", np.array(train))
    np.save(tmp_path / "held.npy", np.array(val))
    write_shard(tmp_path / "a.bin", np.array(train), 300)
    held = str(tmp_path / "held.npy")
    assert tokens(tmp_path / "a.npy") == (train, val)
    assert tokens(tmp_path / "a.bin") == (train, val)


def test_token_shards_are_pointed_at_and_their_tail_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for index, count in enumerate((600, 300, 100)):
        write_shard(tmp_path / f"shards/{index}.bin", np.arange(count) + 1000 * index, 4096)
    prepared = prepare(section(tmp_path / "shards", vocab_size=4096, val_share=0.2), tmp_path / "cache")
    assert [(shard.path.name, shard.start, shard.stop) for shard in prepared.train] == [
        ("0.bin", 0, 600),
        ("1.bin", 0, 200),
    ]
    assert [(shard.path.name, shard.start, shard.stop) for shard in prepared.val] == [
        ("1.bin", 200, 300),
        ("2.bin", 0, 100),
    ]
    assert (prepared.vocab_size, prepared.tokenizer, prepared.train_bytes) == (4096, None, 0)
    assert all(shard.path.parent == tmp_path / "shards" for shard in prepared.train + prepared.val)
    assert open_prepared(prepared.directory) == prepared


@pytest.mark.parametrize("strange", [512, -1])
def test_a_token_outside_the_vocabulary_is_refused_with_file_and_id(strange: int, tmp_path: Path) -> None:
    tokens = np.arange(400)
    tokens[123] = strange
    np.save(tmp_path / "a.npy", tokens)
    message = rf"a\.npy has token id {strange}, outside the vocabulary of 512.*data\.vocab_size"
    with pytest.raises(UserError, match=message):
        prepare(section(tmp_path / "a.npy", vocab_size=512), tmp_path / "cache")


def test_a_directory_made_by_name_is_a_source_of_its_own_and_can_be_moved(corpus: Path, tmp_path: Path) -> None:
    made = prepare(section(corpus), tmp_path / "unused", directory=tmp_path / "out")
    assert made.directory == tmp_path / "out"
    assert prepare(section(corpus), tmp_path / "unused", never, directory=tmp_path / "out") == made
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    used = prepare(section(moved), tmp_path / "unused", never)
    assert (used.directory, used.fingerprint, used.val_bytes) == (moved, made.fingerprint, made.val_bytes)
    assert texts(used, "val")
    assert not (tmp_path / "unused").exists()


def test_a_directory_that_holds_something_else_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not empty and holds no data set"):
        prepare(section(corpus), tmp_path, directory=corpus)
    prepare(section(corpus), tmp_path, directory=tmp_path / "out")
    with pytest.raises(UserError, match="holds another data set"):
        prepare(section(corpus, vocab_size=280), tmp_path, directory=tmp_path / "out")


def test_a_prepared_directory_stands_alone(corpus: Path, tmp_path: Path) -> None:
    prepare(section(corpus), tmp_path, directory=tmp_path / "out")
    with pytest.raises(UserError, match="name it alone"):
        prepare(section(tmp_path / "out", corpus), tmp_path)
    with pytest.raises(UserError, match="is prepared already"):
        prepare(section(tmp_path / "out"), tmp_path, directory=tmp_path / "again")


def test_an_unfinished_or_damaged_data_set_is_not_opened(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no dataset\.json"):
        prepare(section(corpus, format="prepared"), tmp_path)
    prepared = prepare(section(corpus), tmp_path / "cache")
    prepared.train[3].path.unlink()
    with pytest.raises(UserError, match=r"its shard .*train-00003\.bin is gone"):
        open_prepared(prepared.directory)


@pytest.mark.parametrize("text", ["short", "a few\nlines\n" * 20])
def test_a_source_too_short_to_hold_something_out_is_refused_with_the_ways_out(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UserError, match=r"too short: it leaves nothing to .*data\.val_source"):
        prepare(section(tmp_path / "a.txt", val_share=0.001), tmp_path / "cache")


def test_held_out_text_of_its_own_leaves_the_source_whole(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "held.md").write_text("Something quite different.\n")
    prepared = prepare(section(corpus, val_source=str(tmp_path / "held.md")), tmp_path / "cache")
    assert texts(prepared, "train") == DOCUMENTS
    assert texts(prepared, "val") == ["Something quite different.\n"]
