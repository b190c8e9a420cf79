"""An HTTP proxy in front of an S3 server that fails on purpose, and checks what S3 would and moto does not."""

import base64
import hashlib
import http.client
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ERROR = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>on purpose</Message></Error>"


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD path?query` matches.

    `503 SlowDown` and the like: that answer. `stall`: no answer. `stop`: nothing is read of the body. `cut`: closed in
    the middle of the body. `deaf`: the server takes it, its answer is lost. `torn`: half of the answer. `flip`: a byte
    of the body changes. `unconditional`: conditions get lost. `pages`: listings of two entries.
    `replaced`: once it is answered, there is another object in its place.
    """

    kind: str
    request: str
    times: int = 1


@dataclass
class Proxy:
    """`faults` may be changed at any time; `seen` are the requests as they came."""

    upstream: str
    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, request: str) -> str:
        with self.lock:
            self.seen.append(request)
            for fault in self.faults:
                if fault.times and re.search(fault.request, request):
                    fault.times -= 1
                    return fault.kind
        return ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            # the client went first, as it should after a stall
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        kind = self.proxy.take(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length", 0))
        if kind == "stop":
            time.sleep(5)
        if kind in ("stop", "cut"):
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if kind == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if self.command == "PUT":
            digest = base64.b64encode(hashlib.md5(body).digest()).decode()
            kind = kind if self.headers["Content-MD5"] == digest else "400 BadDigest"
        if kind == "stall":
            time.sleep(3)
            self.close_connection = True
        elif re.match(r"\d", kind):
            status, code = kind.split()
            self.reply(int(status), {}, ERROR.format(code).encode())
        else:
            self.forward(kind, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

    def forward(self, kind: str, body: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if name not in ("Expect", "Connection")}
        if kind == "unconditional":
            del headers["If-None-Match"]
        path = self.path.replace("list-type=2", "list-type=2&max-keys=2") if kind == "pages" else self.path
        server = http.client.HTTPConnection(urlsplit(self.proxy.upstream).netloc, timeout=20)
        server.request(self.command, path, body, headers)
        response = server.getresponse()
        data = response.read()
        if kind == "replaced":
            server.request("PUT", path, b"another")
            server.getresponse().read()
        server.close()
        if kind == "deaf":
            self.close_connection = True
            return
        self.reply(response.status, dict(response.getheaders()), data, torn=kind == "torn")

    def reply(self, status: int, headers: dict[str, str], data: bytes, torn: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if torn else data)
        self.close_connection = self.close_connection or torn


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy before the server at `upstream`, at `endpoint`."""
    proxy = Proxy(upstream)
    handler = type("ProxyHandler", (Handler,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # ends at once, though a stalled request may not have
        server.block_on_close = False
        proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
