"""Object stores other than S3, through what fsspec can do for all of them."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import Lock
from typing import Any

import fsspec

from lwray.errors import UserError
from lwray.store.client import Client, Limits, in_parts
from lwray.store.failures import Failure, Missing

PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "memory": "fsspec"}
"""Protocols whose package makes `mode="create"` one conditional request, or is of one process only (memory).

fsspec's default for the others looks first and writes then, so two could win.
"""
CREATING = Lock()
"""Memory looks and writes in two steps."""


class FileSystemClient(Client):
    """One bucket or container. Retries and timeouts are those of the package.

    A `create` whose answer was lost may meet its own object and say False: nobody wins then, but never two do.
    """

    def __init__(self, protocol: str, bucket: str, limits: Limits) -> None:
        if protocol not in PACKAGES:
            raise UserError(
                f"{protocol}:// cannot hold runs: it has no exclusive create. Use s3://, gs://, az:// or a directory."
            )
        self._bucket = bucket
        self._limits = limits
        try:
            self._files: Any = fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False)
        except ImportError:
            package = PACKAGES[protocol]
            raise UserError(f"{protocol}:// needs {package}: run pip install {package}.") from None

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        parts = in_parts(chunks, self._limits.part_bytes)
        first, second = next(parts, b""), next(parts, b"")
        size = len(first)
        if not second:
            with reasons():
                self._files.pipe_file(self._path(key), first)
        else:
            # whole before it is sent: the packages give a file its name even where its writer fails half-way
            with tempfile.NamedTemporaryFile() as spool:
                for part in chain((first, second), parts):
                    spool.write(part)
                spool.flush()
                size = spool.tell()
                with reasons():
                    self._files.put_file(spool.name, self._path(key))
        if self.size(key) != size:
            raise Failure("the store does not have it as it was sent")

    def create(self, key: str, data: bytes) -> bool:
        try:
            with CREATING, reasons():
                self._files.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, key: str, start: int, stop: int | None) -> bytes:
        with reasons():
            data: bytes = self._files.cat_file(self._path(key), start=start, end=stop)
        if stop is not None and len(data) < stop - start:
            raise Failure(f"it ends at byte {start + len(data)}, {stop} were expected")
        return data

    def size(self, key: str) -> int | None:
        try:
            with reasons():
                entry = self._files.info(self._path(key))
        except Missing:
            return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def names(self, key: str) -> list[str]:
        try:
            with reasons():
                entries = self._files.ls(self._path(key), detail=False)
        except Missing:
            return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    def remove(self, key: str) -> None:
        try:
            with reasons():
                self._files.rm(self._path(key), recursive=True)
        except Missing:
            pass

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{key}".rstrip("/")


@contextmanager
def reasons() -> Iterator[None]:
    """Failures by kind alone: the packages raise classes of their own, and their texts may hold addresses."""
    try:
        yield
    except FileExistsError:
        raise
    except FileNotFoundError:
        raise Missing("it is not there") from None
    except Exception as error:
        raise Failure(f"the request failed ({type(error).__name__})") from None
