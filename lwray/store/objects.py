"""An object store by fsspec URL."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lwray.errors import UserError
from lwray.store.client import Client, Limits
from lwray.store.failures import Failure, Unconditional
from lwray.store.store import Store

S3 = ("s3", "s3a")
# an `@`, a `:` or a `?` is where credentials would stand; a secret may hold a `/`, and with it end up in the path
URL = re.compile(r"(?P<protocol>[a-z][a-z0-9]*)://(?P<bucket>[A-Za-z0-9._-]+)(?P<prefix>(/[^?#]*)?)")


class ObjectStore(Store):
    """Objects below a prefix of a bucket: `s3://bucket/prefix`; gs, az and abfs with their fsspec packages.

    Credentials come from the environment of the process that calls (AWS_*, profiles, instance roles) and are neither
    kept here nor pickled. Usable from threads, forked and spawned processes, and beside a running asyncio loop.
    Raises UserError for a URL that cannot be used or holds credentials, and where the package for it is missing.
    """

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        match = URL.fullmatch(url)
        if match is None:
            raise UserError(
                "The storage URL is not of the form s3://bucket/prefix. Credentials do not belong in it: "
                "give them by environment (AWS_ACCESS_KEY_ID, …) or by a profile."
            )
        self.protocol, self.bucket = match["protocol"], match["bucket"]
        self.prefix = match["prefix"].strip("/")
        self.url = f"{self.protocol}://{self.bucket}/{self.prefix}".rstrip("/")
        self.limits = limits or Limits()
        self._clients: dict[int, Client] = {}
        # opened now, so that a missing package is said before anything has started
        self._client()

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As `Store.put`. A large file goes up in parts, several at once; S3 checks each against its Content-MD5."""
        with self._reasons("write", path):
            self._client().put(self._key(path), chunks)

    def create(self, path: str, data: bytes) -> bool:
        """As `Store.create`, by a conditional write. Raises UserError where the store does not honour the condition."""
        try:
            with self._reasons("create", path):
                return self._client().create(self._key(path), data)
        except Unconditional as failure:
            raise UserError(
                f"{self.url} cannot hold runs, because {failure}: two attempts could both own a run. "
                "Choose a store with conditional writes, or a directory."
            ) from None

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Store.read`; all bytes are of one version of the object."""
        with self._reasons("read", path):
            return self._client().read(self._key(path), start, stop)

    def size(self, path: str) -> int | None:
        with self._reasons("look up", path):
            return self._client().size(self._key(path))

    def names(self, directory: str = "") -> list[str]:
        with self._reasons("list", directory):
            return self._client().names(self._key(directory))

    def remove(self, path: str) -> None:
        with self._reasons("remove", path):
            self._client().remove(self._key(path))

    def _client(self) -> Client:
        """This process's client: connections and event loops do not live on in a fork, so a child opens its own.

        The parent's stays in the child unused: to close it there would wait for a loop that no thread runs.
        """
        process = os.getpid()
        return self._clients.get(process) or self._clients.setdefault(process, self._open())

    def _open(self) -> Client:
        if self.protocol in S3:
            try:
                from lwray.store.s3 import S3Client
            except ModuleNotFoundError:
                raise UserError(f"{self.protocol}:// needs s3fs: run pip install 'lwray[s3]'.") from None
            return S3Client(self.bucket, self.limits)
        from lwray.store.filesystem import FileSystemClient

        return FileSystemClient(self.protocol, self.bucket, self.limits)

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self.prefix, path.strip("/")) if part)

    @contextmanager
    def _reasons(self, verb: str, path: str) -> Iterator[None]:
        """Turn a client's reason into a sentence that names the object."""
        try:
            yield
        except Unconditional:
            raise
        except Failure as failure:
            kinds = (kind for kind in (FileNotFoundError, PermissionError) if isinstance(failure, kind))
            place = f"{self.url}/{path}".rstrip("/")
            raise next(kinds, OSError)(f"Cannot {verb} {place}: {failure}") from None
