"""An S3 server of its own process on the loopback, by moto; `python tests/s3_server.py` is that process."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.request import Request, urlopen

from lwray.store.client import Limits
from lwray.store.retry import Retry
from lwray.store.s3_session import Session

BUCKET = "bucket"
SECRETS = ("AKIDOFTHETESTS", "secret-key-of-the-tests", "session-token-of-the-tests")
ENVIRONMENT = dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), SECRETS, strict=True))
LIMITS = Limits(part_bytes=5 * 2**20, read_seconds=1.0, request_seconds=3.0, retry=Retry(2.0, 0.02, 0.2))


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a server with one empty bucket. Its process ends with this block, or with ours."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            with urlopen(Request(f"{endpoint}/{BUCKET}", method="PUT")):
                yield endpoint
        finally:
            process.kill()


@cache
def session(endpoint: str) -> Session:
    return Session(BUCKET, LIMITS)


def ask(operation: str, **arguments: Any) -> dict[str, Any]:
    """One request at the endpoint that the environment names."""
    return session(os.environ["AWS_ENDPOINT_URL"]).request(operation, arguments)


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        # moto looks for an object and writes it in two steps; S3 does both in one
        with one_at_a_time:
            return list(moto(environ, start_response))

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    os.environ["MOTO_PORT"] = str(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
