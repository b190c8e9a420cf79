"""S3 that fails on purpose: what is written is right, or an OSError is raised and nothing half is there."""

import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from faulty_proxy import Fault, Proxy, faulty_proxy
from s3_server import BUCKET, ENVIRONMENT, LIMITS, SECRETS, ask, s3_server

from lwray.errors import UserError
from lwray.store.client import Limits
from lwray.store.failures import Passing
from lwray.store.objects import ObjectStore
from lwray.store.retry import Retry

IMPATIENT = replace(LIMITS, retry=Retry(0.3, 0.02, 0.1), read_seconds=0.5)
DATA = os.urandom(12 * 2**20)


@pytest.fixture(scope="module")
def behind() -> Iterator[Proxy]:
    with s3_server() as server, faulty_proxy(server) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture
def proxy(behind: Proxy) -> Iterator[Proxy]:
    behind.seen.clear()
    yield behind
    behind.faults.clear()
    assert not ask("list_multipart_uploads").get("Uploads")


@pytest.fixture(scope="module")
def opened(behind: Proxy) -> dict[Limits, ObjectStore]:
    """One a module, because to open a client takes longer than most of what is done with it."""
    return {limits: ObjectStore(f"s3://{BUCKET}/runs", limits) for limits in (LIMITS, IMPATIENT)}


@pytest.fixture
def store(opened: dict[Limits, ObjectStore], proxy: Proxy) -> ObjectStore:
    """A place that is empty."""
    opened[LIMITS].remove("")
    proxy.seen.clear()
    return opened[LIMITS]


@pytest.fixture
def impatient(opened: dict[Limits, ObjectStore], store: ObjectStore) -> ObjectStore:
    """The same place, for failures that stay."""
    return opened[IMPATIENT]


PASSING = ["500 InternalError", "503 SlowDown", "429 TooManyRequests", "400 RequestTimeout", "stall", "cut", "deaf"]


@pytest.mark.parametrize("kind", [*PASSING, "flip"])
def test_put_in_one_request_outlives_it(store: ObjectStore, proxy: Proxy, kind: str) -> None:
    proxy.faults.append(Fault(kind, "PUT", times=2 if kind != "stall" else 1))
    store.put("file", [b"whole"])
    assert not proxy.faults[0].times
    assert store.read("file") == b"whole"


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        *((kind, "POST .*uploads") for kind in ("503 SlowDown", "cut")),
        *((kind, "PUT .*partNumber=2") for kind in (*PASSING, "flip", "stop")),
        *((kind, "POST .*uploadId") for kind in ("500 InternalError", "200 InternalError", "stall", "deaf")),
    ],
)
def test_put_in_parts_outlives_it(store: ObjectStore, proxy: Proxy, kind: str, request_: str) -> None:
    proxy.faults.append(Fault(kind, request_))
    store.put("file", [DATA])
    assert not proxy.faults[0].times
    assert store.size("file") == len(DATA)
    assert store.read("file") == DATA
    assert sum("partNumber=1&" in seen for seen in proxy.seen) == 1


def test_an_upload_whose_completion_was_taken_unheard_is_known_by_its_object(store: ObjectStore, proxy: Proxy) -> None:
    complete = "POST .*uploadId"
    proxy.faults += [Fault("deaf", complete), Fault("404 NoSuchUpload", complete, times=99)]
    store.put("file", [DATA])
    assert store.read("file") == DATA


def test_a_put_reads_no_further_ahead_than_its_limits(store: ObjectStore, proxy: Proxy) -> None:
    store = ObjectStore(store.url, replace(LIMITS, parallel_parts=1))
    proxy.faults.append(Fault("stall", "PUT .*partNumber=1"))
    ahead = []

    def chunks() -> Iterator[bytes]:
        for number in range(6):
            ahead.append(number - sum("partNumber" in seen for seen in proxy.seen))
            yield bytes(LIMITS.part_bytes)

    store.put("file", chunks())
    assert max(ahead) <= 3
    assert store.size("file") == 6 * LIMITS.part_bytes


@pytest.mark.parametrize("kind", PASSING)
def test_create_outlives_it_and_knows_its_own_object(store: ObjectStore, proxy: Proxy, kind: str) -> None:
    proxy.faults.append(Fault(kind, "PUT"))
    assert store.create("manifest", b"mine")
    assert not proxy.faults[0].times
    assert not store.create("manifest", b"mine")
    assert store.read("manifest") == b"mine"


def test_of_two_that_lost_their_answers_and_wrote_equal_bytes_one_has_created(
    store: ObjectStore, impatient: ObjectStore, proxy: Proxy
) -> None:
    proxy.faults.append(Fault("deaf", "PUT", times=2))
    assert store.create("manifest", b"equal bytes")
    proxy.faults.append(Fault("deaf", "PUT", times=2))
    assert not impatient.create("manifest", b"equal bytes")


@pytest.mark.parametrize("kind", ["503 SlowDown", "stall", "torn"])
def test_read_outlives_it(store: ObjectStore, proxy: Proxy, kind: str) -> None:
    store.put("file", [DATA])
    proxy.faults += [Fault(kind, "GET .*file"), Fault(kind, "HEAD")]
    assert store.read("file") == DATA
    assert store.size("file") == len(DATA)
    assert not proxy.faults[0].times


@pytest.mark.parametrize("kind", ["500 InternalError", "deaf"])
def test_names_and_remove_outlive_it(store: ObjectStore, proxy: Proxy, kind: str) -> None:
    for name in ("a", "b", "c/d"):
        store.put(f"run/{name}", [b"x"])
    proxy.faults += [Fault(kind, "GET .*delimiter"), Fault(kind, "DELETE", times=2)]
    assert store.names("run") == ["a", "b", "c"]
    store.remove("run")
    assert store.names() == []


def test_long_listings_come_in_pages(store: ObjectStore, proxy: Proxy) -> None:
    for name in "abcde":
        store.put(f"{name}/file", [b"x"])
    proxy.faults.append(Fault("pages", "GET .*list-type", times=99))
    assert store.names() == list("abcde")
    store.remove("")
    assert store.names() == []


def test_a_file_that_is_replaced_while_it_is_read_is_not_read_as_a_mixture(store: ObjectStore, proxy: Proxy) -> None:
    store.put("file", [DATA])
    proxy.faults.append(Fault("replaced", "GET .*file"))
    with pytest.raises(OSError, match="replaced"):
        store.read("file")


def test_a_store_that_ignores_conditions_is_refused(store: ObjectStore, proxy: Proxy) -> None:
    store = ObjectStore(store.url, LIMITS)
    proxy.faults.append(Fault("unconditional", "PUT", times=99))
    with pytest.raises(UserError, match="conditional writes"):
        store.create("attempts/0001/owner", b"x")
    assert store.names() == []


def test_a_condition_is_proven_once_a_process(store: ObjectStore, proxy: Proxy) -> None:
    store = ObjectStore(store.url, LIMITS)
    for name in "abc":
        assert store.create(name, b"x")
    assert [seen.split()[0] for seen in proxy.seen] == ["PUT"] * 4


STAYING = ["503 SlowDown", "403 AccessDenied", "404 NoSuchUpload", "stall"]


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        *((kind, "POST .*uploads") for kind in STAYING),
        *((kind, "PUT .*partNumber=2") for kind in (*STAYING, "deaf")),
        *((kind, "POST .*uploadId") for kind in (*STAYING, "deaf")),
    ],
)
def test_what_stays_is_an_error_and_nothing_half_is_there(
    impatient: ObjectStore, proxy: Proxy, kind: str, request_: str
) -> None:
    proxy.faults.append(Fault(kind, request_, times=99))
    with pytest.raises(OSError, match="Cannot write s3://bucket/runs/file: "):
        impatient.put("file", [DATA])
    tries = sum(re.search(request_, seen) is not None for seen in proxy.seen)
    assert tries == 1 if kind.startswith("40") else tries > 1
    proxy.faults.clear()
    if (kind, request_) == ("deaf", "POST .*uploadId"):
        # taken each time; only nobody was told
        assert impatient.read("file") == DATA
    else:
        assert impatient.names() == []


CALLS: list[Callable[[ObjectStore], object]] = [
    lambda store: store.put("file", [b"x"]),
    lambda store: store.create("file", b"x"),
    lambda store: store.read("file"),
    lambda store: store.size("file"),
    lambda store: store.names(),
    lambda store: store.remove("file"),
]


@pytest.mark.parametrize("kind", ["503 SlowDown", "403 AccessDenied", "403 InvalidAccessKeyId", "cut"])
@pytest.mark.parametrize("call", CALLS, ids=["put", "create", "read", "size", "names", "remove"])
def test_no_credentials_are_in_errors_or_logs(
    impatient: ObjectStore,
    proxy: Proxy,
    kind: str,
    call: Callable[[ObjectStore], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.faults.append(Fault(kind, ".", times=99))
    with pytest.raises(OSError) as failure:
        call(impatient)
    assert isinstance(failure.value, PermissionError) == kind.startswith("403")
    assert "s3://bucket/runs" in str(failure.value)
    assert "\n" not in str(failure.value)
    told = caplog.text + repr(failure.value) + "".join(traceback.format_exception(failure.value))
    assert not any(secret in told for secret in SECRETS)
    if kind.startswith("403"):
        assert len(proxy.seen) == 1


def test_patience_is_bounded_and_waits_grow() -> None:
    times: list[float] = []

    def call() -> None:
        times.append(time.monotonic())
        raise Passing("always")

    with pytest.raises(OSError, match="always"):
        Retry(patience=1.0, first_wait=0.05, longest_wait=0.4)(call)
    assert 1.0 <= times[-1] - times[0] < 1.6
    waits = [after - before for before, after in pairwise(times)]
    assert 0.02 < waits[0] < 0.1
    assert max(waits) > 0.19
