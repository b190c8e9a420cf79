"""One contract for every place that holds runs: a directory, S3, and what fsspec reaches."""

import asyncio
import errno
import multiprocessing
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from s3_server import BUCKET, ENVIRONMENT, LIMITS, SECRETS, ask, s3_server

from lwray.errors import UserError
from lwray.store import Store, open_store
from lwray.store.client import Limits, in_parts
from lwray.store.local import WITHOUT_LINKS, LocalStore
from lwray.store.objects import ObjectStore

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            patch.setenv(name, value)
        yield endpoint


@pytest.fixture(params=["directory", "s3", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    name = uuid.uuid4().hex
    if request.param == "directory":
        return LocalStore(tmp_path / "runs")
    return ObjectStore(f"s3://{BUCKET}/runs/{name}" if request.param == "s3" else f"memory://{name}/runs", LIMITS)


@pytest.fixture(params=["directory", "s3"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Those that several processes can share."""
    return (
        LocalStore(tmp_path)
        if request.param == "directory"
        else ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", LIMITS)
    )


examples = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@examples
@given(chunks=st.lists(st.binary(max_size=100)), bounds=st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_what_was_put_is_read_whole_and_by_ranges(store: Store, chunks: list[bytes], bounds: tuple[int, int]) -> None:
    data = b"".join(chunks)
    store.put("a/file", (memoryview(chunk) for chunk in chunks))
    assert store.size("a/file") == len(data)
    assert store.read("a/file") == data
    start, stop = sorted(min(bound, len(data)) for bound in bounds)
    assert store.read("a/file", start, stop) == data[start:stop]
    assert store.read("a/file", start) == data[start:]


@given(sizes=st.lists(st.integers(0, 40)), part_bytes=st.integers(1, 9))
def test_parts_are_the_same_bytes_in_equal_pieces(sizes: list[int], part_bytes: int) -> None:
    data = os.urandom(sum(sizes))
    reused = bytearray(40)

    def chunks() -> Iterator[memoryview]:
        at = 0
        for size in sizes:
            reused[:size] = data[at : at + size]
            yield memoryview(reused)[:size]
            at += size

    parts = list(in_parts(chunks(), part_bytes))
    assert b"".join(parts) == data
    assert all(len(part) == part_bytes for part in parts[:-1])
    assert all(parts)


def test_the_parts_of_a_huge_file_grow_so_that_they_are_few() -> None:
    lengths = [len(part) for part in in_parts([bytes(5000)], 1)]
    assert sum(lengths) == 5000
    assert lengths[999:1001] == [1, 2]
    assert max(lengths) == 3


def test_a_large_file_goes_up_and_down_in_parts(store: Store) -> None:
    data = os.urandom(17 * MIB + 6)
    store.put("large", [data[: 7 * MIB], memoryview(data)[7 * MIB :].cast("H")])
    assert store.size("large") == len(data)
    assert store.read("large") == data
    assert store.read("large", 3, 16 * MIB) == data[3 : 16 * MIB]


def test_a_file_that_is_not_there(store: Store) -> None:
    assert store.size("a/file") is None
    assert store.names("a") == []
    assert store.names() == []
    store.remove("a/file")
    with pytest.raises(FileNotFoundError):
        store.read("a/file")
    with pytest.raises(FileNotFoundError):
        store.read("a/file", 3, 4)


def test_a_file_that_is_shorter_than_asked(store: Store) -> None:
    store.put("file", [b"12345"])
    for start in (3, 5, 7):
        with pytest.raises(OSError):
            store.read("file", start, 9)


def test_put_replaces_and_create_does_not(store: Store) -> None:
    store.put("a/neighbour", [b""])
    assert store.create("a/file", b"first")
    assert not store.create("a/file", b"second")
    assert not store.create("a/file", b"first")
    assert store.read("a/file") == b"first"
    store.put("a/file", [b"third"])
    assert store.read("a/file") == b"third"
    assert not store.create("a/file", b"first")
    store.remove("a/file")
    assert store.create("a/file", b"fourth")


def test_names_are_those_right_below_and_at_once(store: Store) -> None:
    paths = ("b", "a/2", "a/1", "a/deep/er", "ab/c", "a b&+ü%41")
    for path in paths:
        directory, _, name = path.rpartition("/")
        assert name not in store.names(directory)
        store.put(path, [b"x"])
        assert name in store.names(directory)
    assert store.names() == sorted({"a", "b", "ab", "a b&+ü%41"})
    assert store.names("a") == ["1", "2", "deep"]
    assert store.read("a b&+ü%41") == b"x"


def test_remove_takes_a_file_or_a_directory_and_no_neighbour(store: Store) -> None:
    for path in ("a/1", "a/deep/er", "ab", "ac/1", "ac/2"):
        store.put(path, [b"x"])
    store.remove("ac/1")
    store.remove("a")
    assert store.names() == ["ab", "ac"]
    assert store.names("ac") == ["2"]
    assert store.size("a/1") is None


@pytest.mark.parametrize("before", [0, 12 * MIB], ids=["small", "large"])
def test_a_put_that_fails_leaves_nothing(store: Store, before: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(before)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as failure:
        store.put("a/new", chunks())
    assert failure.value.errno == errno.ENOSPC
    assert store.names("a") == []
    store.put("a/old", [b"whole"])
    with pytest.raises(OSError, match="No space left"):
        store.put("a/old", chunks())
    assert store.names("a") == ["old"]
    assert store.read("a/old") == b"whole"
    assert not ask("list_multipart_uploads").get("Uploads")


def create_many(store: Store, writer: int, files: int = 4) -> list[bool]:
    return [store.create(f"a/{file:02}", b"%d" % writer) for file in range(files)]


def check_one_winner(store: Store, outcomes: list[list[bool]]) -> None:
    for file, won in enumerate(zip(*outcomes, strict=True)):
        assert sum(won) == 1
        assert store.read(f"a/{file:02}") == b"%d" % won.index(True)
    assert len(store.names("a")) == 1 + len(outcomes[0])


def test_of_sixteen_threads_one_creates(store: Store) -> None:
    store.put("a/neighbour", [b""])
    with ThreadPoolExecutor(16) as pool:
        check_one_winner(store, list(pool.map(partial(create_many, store), range(16))))


def test_of_two_processes_one_creates(shared_store: Store) -> None:
    shared_store.put("a/neighbour", [b""])
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        check_one_winner(shared_store, list(pool.map(partial(create_many, files=40), [shared_store] * 2, range(2))))


def test_sixteen_threads_put_one_name_and_one_of_them_is_there_whole(store: Store) -> None:
    data = [bytes([writer]) * 1000 for writer in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda mine: store.put("a/file", [mine[:500], mine[500:]]), data))
    assert store.read("a/file") in data
    assert store.names("a") == ["file"]


def test_it_works_beside_a_running_event_loop(store: Store) -> None:
    async def main() -> bytes:
        store.put("file", [b"x"])
        return store.read("file")

    assert asyncio.run(main()) == b"x"


def test_a_forked_child_uses_the_store_of_its_parent() -> None:
    code = """if True:
        import os
        from lwray.store import open_store
        store = open_store("s3://bucket/forked")
        store.put("parent", [b"x"])
        child = os.fork()
        if child == 0:
            store.put("child", [store.read("parent") * 2])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert store.read("child") == b"xx"
        """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_credentials_are_in_no_place_that_travels() -> None:
    store = ObjectStore(f"s3://{BUCKET}/runs")
    store.put("file", [b"x"])
    travelling = f"{store!r} {store.url} {vars(store)} {pickle.dumps(store)!r}"
    assert not any(secret in travelling for secret in SECRETS)
    assert pickle.loads(pickle.dumps(store)).read("file") == b"x"


@pytest.mark.parametrize(
    "url",
    ["s3://KEY:SECRET@b/x", "s3://KEY@b/x", "s3://KEY:SEC/RET@b/x", "s3://b/x?secret=SECRET", "s3://b#SECRET", "s3://"],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(UserError, match="s3://bucket/prefix") as refusal:
        open_store(url)
    assert not any(word in str(refusal.value) for word in ("KEY:", "KEY@", "SECRET", "RET@"))


@pytest.mark.parametrize("protocol", ["ftp", "http", "github", "nothing"])
def test_a_place_without_an_exclusive_create_is_refused(protocol: str) -> None:
    with pytest.raises(UserError, match="no exclusive create"):
        open_store(f"{protocol}://host/runs")


@pytest.mark.parametrize(("url", "package"), [("s3://b/x", "lwray[s3]"), ("gs://b/x", "gcsfs")])
def test_a_missing_package_is_named(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("s3fs", "gcsfs", "lwray.store.s3", "lwray.store.s3_session"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as refusal:
        open_store(url)
    assert package in str(refusal.value)


@pytest.mark.parametrize(
    "call",
    [lambda store: store.put("a", [b"x"]), lambda store: store.create("a", b"x"), lambda store: store.names()],
    ids=["put", "create", "names"],
)
def test_a_bucket_that_is_not_there_is_said(call: Callable[[Store], object]) -> None:
    with pytest.raises(FileNotFoundError, match=r"s3://nowhere/runs.*no such bucket"):
        call(ObjectStore("s3://nowhere/runs"))


def test_no_credentials_are_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(PermissionError, match="AWS_ACCESS_KEY_ID"):
        ObjectStore(f"s3://{BUCKET}/runs", Limits()).names()


@pytest.mark.parametrize("refusal", WITHOUT_LINKS)
def test_where_there_are_no_hard_links_a_file_is_still_made_by_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", no_link)
    store = LocalStore(tmp_path)
    assert store.create("once", b"first")
    assert not store.create("once", b"second")
    assert store.read("once") == b"first"
    assert store.names() == ["once"]


def test_a_link_whose_answer_was_lost_is_known_for_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def made_but_denied(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError

    monkeypatch.setattr(os, "link", made_but_denied)
    assert LocalStore(tmp_path).create("once", b"first")
    assert LocalStore(tmp_path).names() == ["once"]
