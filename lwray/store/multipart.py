"""An S3 object that is sent in parts and appears whole or not at all."""

import secrets
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lwray.store.failures import Failure, Missing

if TYPE_CHECKING:
    from lwray.store.s3 import S3Client


class Upload:
    """A context: the parts that were added make up the object at its end; they are removed where it ends in an error.

    Parts of a process that was killed stay in the bucket, unseen, until a lifecycle rule removes them.
    """

    def __init__(self, client: "S3Client", key: str) -> None:
        self._client = client
        self._key = key
        self._token = secrets.token_hex(16)
        self._size = 0
        self._tags: list[str] = []
        self._running: deque[Future[dict[str, Any]]] = deque()
        self._stop = Event()

    def __enter__(self) -> Self:
        metadata = {self._client.TOKEN: self._token}
        answer = self._client.call("create_multipart_upload", Key=self._key, Metadata=metadata)
        self._upload = {"Key": self._key, "UploadId": answer["UploadId"]}
        self._pool = ThreadPoolExecutor(self._client.limits.parallel_parts)
        return self

    def add(self, part: bytes) -> None:
        """Send the next part; waits while as many as `parallel_parts` are under way."""
        if len(self._running) == self._client.limits.parallel_parts:
            self._finish_one()
        number = len(self._tags) + len(self._running) + 1
        self._size += len(part)
        self._running.append(
            self._pool.submit(
                self._client.call, "upload_part", self._stop, PartNumber=number, Body=part, **self._upload
            )
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                while self._running:
                    self._finish_one()
                self._complete()
        except BaseException:
            self._abort()
            raise
        if error is not None:
            self._abort()
        self._pool.shutdown()

    def _finish_one(self) -> None:
        self._tags.append(self._running.popleft().result()["ETag"])

    def _complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, 1)]
        taken = True
        try:
            self._client.call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._upload)
        except Missing:
            # an earlier try was taken, and its answer lost: then the object is there
            taken = False
        written = self._client.head(self._key) or {}
        ours = written.get("Metadata", {}).get(self._client.TOKEN) == self._token
        # taken and not ours: another `put` of this name came after
        if (ours and written["ContentLength"] != self._size) or not (ours or taken):
            raise Failure("the store does not have it as it was sent")

    def _abort(self) -> None:
        """Remove the parts. First the last of them must have ended: one that comes later would stay."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        # where it fails too, the error that led here says more
        with suppress(Failure):
            self._client.call("abort_multipart_upload", **self._upload)
