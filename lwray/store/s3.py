"""S3, and what speaks its protocol."""

import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from lwray.store.client import Client, Limits, in_parts
from lwray.store.failures import Failure, Missing, PastEnd, Refused, Unconditional
from lwray.store.multipart import Upload
from lwray.store.s3_session import Session


class S3Client(Client):
    """One bucket. A request whose answer is lost is sent again; `create` then recognises its own object."""

    TOKEN = "lwray-write"
    """Metadata by which a writer knows its own object again. Not the bytes: another writer's may be equal."""

    def __init__(self, bucket: str, limits: Limits) -> None:
        self.limits = limits
        self._session = Session(bucket, limits)
        self._conditional = False

    def call(self, operation: str, stop: Event | None = None, **arguments: Any) -> dict[str, Any]:
        """An S3 operation, tried again while its failure may pass; a body in the answer is read to its end."""
        return self.limits.retry(lambda: self._session.request(operation, arguments), stop)

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        parts = in_parts(chunks, self.limits.part_bytes)
        first, second = next(parts, b""), next(parts, None)
        if second is None:
            self.write(key, first)
            return
        with Upload(self, key) as upload:
            for part in (first, second):
                upload.add(part)
            # the names would keep two parts in memory
            del first, second, part
            for part in parts:
                upload.add(part)

    def write(self, key: str, data: bytes, **condition: Any) -> None:
        """One PUT of an object."""
        self.call("put_object", Key=key, Body=data, **condition)

    def create(self, key: str, data: bytes) -> bool:
        token = secrets.token_hex(16)
        condition = {"IfNoneMatch": "*", "Metadata": {self.TOKEN: token}}
        try:
            self.write(key, data, **condition)
        except Refused:
            # looked up after the first try too: aiohttp by itself sends a PUT again where a kept connection had gone
            return self.wrote(key, token)
        if not self._conditional:
            self._prove(key, data, condition)
        return True

    def head(self, key: str) -> dict[str, Any] | None:
        """An object's length, metadata and version tag; None where there is none."""
        try:
            return self.call("head_object", Key=key)
        except Missing:
            return None

    def wrote(self, key: str, token: str) -> bool:
        """Whether the object is the one that was written with this token."""
        head = self.head(key)
        return head is not None and head["Metadata"].get(self.TOKEN) == token

    def read(self, key: str, start: int, stop: int | None) -> bytes:
        if stop is not None and stop <= start:
            if self.size(key) is None:
                raise Missing("it is not there")
            return b""
        step = self.limits.part_bytes
        try:
            head = self._range(key, start, start + step if stop is None else min(stop, start + step))
        except PastEnd:
            if stop is None:
                return b""
            raise
        size = int(head["ContentRange"].rpartition("/")[2])
        end = size if stop is None else stop
        if end > size:
            raise Failure(f"it ends at byte {size}, {end} were expected")
        rest = range(start + step, end, step)
        with ThreadPoolExecutor(self.limits.parallel_parts) as pool:
            bodies = pool.map(lambda at: self._range(key, at, min(end, at + step), head["ETag"])["Body"], rest)
            return b"".join((head["Body"], *bodies)) if rest else head["Body"]

    def size(self, key: str) -> int | None:
        head = self.head(key)
        return None if head is None else int(head["ContentLength"])

    def names(self, key: str) -> list[str]:
        prefix = f"{key}/" if key else ""
        names = set()
        for page in self._pages(Prefix=prefix, Delimiter="/"):
            names |= {entry["Key"] for entry in page.get("Contents", ())}
            names |= {entry["Prefix"].rstrip("/") for entry in page.get("CommonPrefixes", ())}
        # an object with the directory's own name is what consoles leave behind for an empty one
        return sorted(name.removeprefix(prefix) for name in names - {prefix})

    def remove(self, key: str) -> None:
        pages = self._pages(Prefix=f"{key}/" if key else "")
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        # one by one: of a bulk delete's errors and checksums every store has its own idea
        with ThreadPoolExecutor(self.limits.parallel_parts) as pool:
            for _ in pool.map(lambda below: self.call("delete_object", Key=below), [*keys, *([key] if key else [])]):
                pass

    def _prove(self, key: str, data: bytes, condition: dict[str, Any]) -> None:
        """Send a create that was taken once more: a store that takes it again ignores the condition."""
        try:
            self.write(key, data, **condition)
        except Refused:
            self._conditional = True
            return
        self.call("delete_object", Key=key)
        raise Unconditional("its store ignores If-None-Match on PUT")

    def _range(self, key: str, start: int, stop: int, version: str | None = None) -> dict[str, Any]:
        condition: dict[str, Any] = {"IfMatch": version} if version else {}
        try:
            return self.call("get_object", Key=key, Range=f"bytes={start}-{stop - 1}", **condition)
        except Refused:
            raise Failure("it was replaced while it was read") from None

    def _pages(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        page = self.call("list_objects_v2", **arguments)
        yield page
        while page.get("IsTruncated"):
            page = self.call("list_objects_v2", **arguments, ContinuationToken=page["NextContinuationToken"])
            yield page
