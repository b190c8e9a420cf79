"""Single requests to S3 through s3fs, and what their failures mean."""

import base64
import hashlib
import io
import logging
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ChecksumError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from s3fs import S3FileSystem

from lwray.store.client import Limits
from lwray.store.failures import Denied, Failure, Missing, Passing, PastEnd, Refused

PASSING_STATUS = {408, 429, 500, 502, 503, 504}
PASSING_CODES = {
    "BadDigest",  # changed on the way
    "ConditionalRequestConflict",  # two conditional writes met
    "IncompleteBody",
    "InternalError",  # also inside an answer 200
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
}


class Session:
    """One bucket, as s3fs reaches it: credentials, profile, region and endpoint come from the environment."""

    def __init__(self, bucket: str, limits: Limits) -> None:
        self._bucket = bucket
        self._limits = limits
        # not shared with others: their directory cache and their retries are not ours
        self._files = S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": limits.connect_seconds,
                "read_timeout": limits.read_seconds,
                "retries": {"total_max_attempts": 1},
                "max_pool_connections": 8 * limits.parallel_parts,
                # newer checksums are refused by older stores; bodies carry their MD5
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
        for name in ("botocore", "aiobotocore"):
            # at DEBUG it writes signed headers, and with them session tokens
            logger = logging.getLogger(name)
            logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))

    def request(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One try of an operation of the S3 client; `Body` is bytes, both ways. Raises Failure."""
        try:
            answer: dict[str, Any] = sync(
                self._files.loop,
                self._request,
                operation,
                with_checksum(arguments),
                timeout=self._limits.request_seconds,
            )
        except (ClientError, BotoCoreError, aiohttp.ClientError, OSError) as error:
            raise reason(error) from None
        return answer

    async def _request(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        client = await self._files.set_session()
        answer: dict[str, Any] = await getattr(client, operation)(Bucket=self._bucket, **arguments)
        if "Body" in answer:
            async with answer["Body"] as body:
                answer["Body"] = await body.read()
        return answer


def with_checksum(arguments: dict[str, Any]) -> dict[str, Any]:
    """The body with its MD5, which S3 compares: the one checksum that every store of this protocol knows."""
    if "Body" not in arguments:
        return arguments
    digest = hashlib.md5(arguments["Body"], usedforsecurity=False).digest()
    # a file, because aiohttp sends that in pieces and lets other requests of the loop go on
    return {**arguments, "Body": io.BytesIO(arguments["Body"]), "ContentMD5": base64.b64encode(digest).decode()}


def reason(error: Exception) -> Failure:
    """What a failed try means. Texts are lwray's own: those of the libraries may hold addresses or credentials."""
    if isinstance(error, ClientError):
        return answered(error)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError, ProfileNotFound)):
        return Denied("no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE")
    if isinstance(error, FSTimeoutError) or "Timeout" in type(error).__name__:
        return Passing("the store did not answer in time")
    broken = (HTTPClientError, ConnectionError, ChecksumError, IncompleteReadError, ResponseParserError)
    if isinstance(error, (*broken, aiohttp.ClientError, OSError)):
        return Passing(f"the connection to the store failed ({type(error).__name__})")
    return Failure(f"the request could not be made ({type(error).__name__})")


def answered(error: ClientError) -> Failure:
    """What an answer that is an error means."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error.response.get("Error", {}).get("Code", "")
    text = f"the store answered {status}" + (f" {code}" if code != str(status) else "")
    if code == "NoSuchBucket":
        return Missing("there is no such bucket")
    if status == 404:
        return Missing("it is not there")
    if status == 412:
        return Refused(text)
    if status == 416:
        return PastEnd("it ends before the bytes that were expected")
    if status in (401, 403):
        return Denied(f"{text}; check the credentials and what they may do in this bucket")
    if status in PASSING_STATUS or code in PASSING_CODES:
        return Passing(text)
    return Failure(text)
