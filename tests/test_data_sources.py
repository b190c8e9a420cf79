"""Sources: every way to name text gives the same documents, and bad input says what is wrong with it."""

import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwray.config.schema import DataSection
from lwray.data.heldout import HeldOut, pieces, runs
from lwray.data.sources import documents, find_units, kind_of
from lwray.errors import UserError

DOCUMENTS = [f"Document {n}.\n" + "A line of it, näher.\n" * (n % 17) for n in range(400)]


def read(*names: str | Path, max_bytes: int = 0, **keys: object) -> list[str]:
    data = DataSection(source=[str(name) for name in names], **keys)
    return [text for unit in find_units(data.source, data, max_bytes) for text in documents(unit)]


def write_texts(where: Path) -> str:
    where.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (where / f"{number:04d}.txt").write_text(text)
    return str(where)


def write_jsonl(where: Path) -> str:
    path = where.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS))
    return str(path)


def write_jsonl_gz(where: Path) -> str:
    path = where.with_suffix(".jsonl.gz")
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    return str(path)


def write_parquet(where: Path) -> str:
    path = where.with_suffix(".parquet")
    pq.write_table(pa.table({"id": range(400), "text": DOCUMENTS}), path, row_group_size=23)
    return str(path)


def write_hub(where: Path) -> str:
    (where / "data").mkdir(parents=True)
    pq.write_table(pa.table({"text": DOCUMENTS}), where / "data/train-00000-of-00001.parquet")
    return f"hf://{where}@train"


WRITERS: Sequence[Callable[[Path], str]] = [
    write_texts,
    write_jsonl,
    write_jsonl_gz,
    write_parquet,
    write_hub,
]


@pytest.fixture(autouse=True)
def _own_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub-cache"))


@pytest.mark.parametrize("write", WRITERS)
def test_the_same_documents_come_out_of_every_format(write: Callable[[Path], str], tmp_path: Path) -> None:
    assert read(write(tmp_path / "corpus")) == DOCUMENTS


# all but gzip, which is one part and stays whole
@pytest.mark.parametrize("write", [write for write in WRITERS if write is not write_jsonl_gz])
def test_max_bytes_keeps_about_so_much_evenly_spread(
    write: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lwray.data.sources.SMALLEST_PART", 1000)
    kept = read(write(tmp_path / "corpus"), max_bytes=16_000)
    assert 8_000 < sum(len(text.encode()) for text in kept) < 24_000
    places = [DOCUMENTS.index(text) for text in kept]
    assert places == sorted(places)
    assert min(places) < 100
    assert max(places) > 300


def test_a_large_file_is_read_in_stretches_that_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lwray.data.sources.PART_BYTES", 5000)
    text = "".join(DOCUMENTS)
    (tmp_path / "a.txt").write_text(text)
    data = DataSection(source=[str(tmp_path / "a.txt")])
    units = find_units(data.source, data)
    stretches = [text for unit in units for text in documents(unit)]
    assert len(units) > 10
    assert "".join(stretches) == text
    assert all(stretch.endswith("\n") for stretch in stretches)
    assert read(write_jsonl(tmp_path / "b")) == DOCUMENTS


def test_a_glob_and_a_directory_name_files_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "deep/c.py", "d.bin", ".hidden.txt", "deep/.git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "deep/empty.py").touch()
    assert read(tmp_path) == ["a.md", "b.txt", "deep/c.py"]
    assert read(f"{tmp_path}/**/*.[pt]*") == ["b.txt", "deep/c.py"]
    assert read(tmp_path / "b.txt", tmp_path / "a.md") == ["b.txt", "a.md"]


def test_the_standard_library_is_a_few_megabytes_of_python_without_its_tests() -> None:
    data = DataSection()
    paths = [part.path for unit in find_units(data.source, data) for part in unit.parts]
    assert len(paths) > 500
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.parts)]
    assert sum(len(text) for text in read("python:stdlib", max_bytes=300_000)) == pytest.approx(3e5, rel=0.2)


def test_text_key_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_text('{"body": "yes", "text": "no"}\n\n{"body": "also"}')
    assert read(tmp_path / "a.ndjson", text_key="body") == ["yes", "also"]


def test_a_name_without_its_suffix_is_read_as_data_format_says(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text('{"text": "yes"}\n')
    assert read(tmp_path / "corpus") == ['{"text": "yes"}\n']
    assert read(tmp_path / "corpus", format="jsonl") == ["yes"]


def bad(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"ab\0c", r"a.txt is a binary file \(a zero byte at 2\)"),
        ("a.txt", b"fine\nGr\xfc\xdfe", "a.txt is not UTF-8 at byte 7"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is not a JSON object but list"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', "line 1 has no 'text'; set data.text_key .*'body', 'id'"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: 'text' is int, not text"),
        ("a.jsonl", rb'{"text": "a\ud800"}', "line 1: 'text' has half a surrogate pair at character 1"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xfc"}', "a.jsonl is not UTF-8 at byte 24"),
        ("a.jsonl.gz", b"plain", "a.jsonl.gz is not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-4], "a.jsonl.gz is not a whole gzip file"),
        ("a.parquet", b"PAR0", "a.parquet is not a Parquet file"),
    ],
)
def test_a_bad_file_is_named_with_the_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(bad(tmp_path / name, content))


def test_a_bad_line_is_counted_from_the_start_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lwray.data.sources.PART_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 500 + "broken\n")
    with pytest.raises(UserError, match="line 501 is not JSON"):
        read(tmp_path / "a.jsonl")


def test_a_parquet_file_without_the_column_is_refused_with_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet has no column 'text'.*'id', 'body'"):
        read(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column 'id' is int64, not text"):
        read(tmp_path / "a.parquet", text_key="id")


def test_a_hub_data_set_without_the_column_or_split_is_refused(tmp_path: Path) -> None:
    name = write_hub(tmp_path / "corpus")
    with pytest.raises(UserError, match=r"has no column 'body'.*'text'"):
        read(name, text_key="body")
    with pytest.raises(UserError, match='@test cannot be loaded: Unknown split "test"'):
        read(name.replace("@train", "@test"))
    with pytest.raises(UserError, match="nowhere@train cannot be loaded"):
        read(f"hf://{tmp_path}/nowhere")


def test_a_name_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    with pytest.raises(UserError, match=r"no file matches '.*\*\.txt'"):
        read(f"{tmp_path}/*.txt")
    with pytest.raises(UserError, match=r"no file matches '.*nowhere'"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no file under .* has a known suffix .*\.jsonl.*glob"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"every file of .* is empty \(1 of them\)"):
        read(f"{tmp_path}/*.jpg")


def test_text_and_token_shards_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mixes token shards and text"):
        kind_of(["a.bin", "b.txt"], DataSection())


@given(text=st.text("ab \n", max_size=300), limit=st.integers(1, 40))
def test_pieces_join_to_the_text_and_end_at_lines_where_they_can(text: str, limit: int) -> None:
    cut = list(pieces(text, limit))
    assert "".join(cut) == text
    assert all(0 < len(piece) <= limit for piece in cut)
    assert all(piece.endswith("\n") or "\n" not in piece for piece in cut[:-1])


@given(text=st.text("abc\n", min_size=1, max_size=2000), every=st.integers(2, 9))
def test_one_in_so_many_pieces_of_a_document_is_held_out(text: str, every: int) -> None:
    found = list(runs(text, HeldOut(20, every)))
    assert "".join(part for _, part in found) == text
    assert all(a[0] != b[0] for a, b in itertools.pairwise(found))
    held = sum(len(list(pieces(part, 20))) for is_held, part in found if is_held)
    assert abs(held - len(list(pieces(text, 20))) / every) < 1
