"""What the metadata server of a cloud machine says about its end: AWS and Google Cloud."""

import json
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from datetime import datetime

from lwray.errors import UserError

SERVER = "http://169.254.169.254"
"""Of both clouds, on every machine."""
TIMEOUT_S = 2.0
TRIES, PAUSE_S = 5, 2.0
"""A machine that has just started may not reach it yet."""
# the address is the machine's own: a proxy would ask another one's
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Cloud(ABC):
    """One machine's own view of its cloud. Methods raise OSError where the metadata server does not answer."""

    name: str

    def __init__(self, server: str) -> None:
        self.server = server

    @abstractmethod
    def is_here(self) -> bool:
        """Whether the machine is one of this cloud's."""

    @abstractmethod
    def deadline(self) -> float | None:
        """By when the machine is taken away, in Unix seconds; None while nobody has said so."""


class Aws(Cloud):
    """EC2, by version 2 of its metadata service: every question needs a token."""

    name = "AWS"
    _token = ""

    def is_here(self) -> bool:
        self._renew()
        return bool(self._token)

    def deadline(self) -> float | None:
        path = "/latest/meta-data/spot/instance-action"
        status, text = ask(self.server + path, {"X-aws-ec2-metadata-token": self._token})
        if status == 401:
            self._renew()
            status, text = ask(self.server + path, {"X-aws-ec2-metadata-token": self._token})
        if status == 404:
            return None
        expect(status)
        # {"action": "terminate", "time": "2026-11-21T15:12:44Z"}; a machine that stops or hibernates goes as well
        return datetime.fromisoformat(json.loads(text)["time"]).timestamp()

    def _renew(self) -> None:
        header = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, text = ask(f"{self.server}/latest/api/token", header, method="PUT")
        self._token = text if status == 200 else ""


class Gcp(Cloud):
    """Compute Engine, which gives spot machines 30 s."""

    name = "Google Cloud"
    notice_s = 30.0

    def is_here(self) -> bool:
        return self._ask("instance/id")[0] == 200

    def deadline(self) -> float | None:
        status, text = self._ask("instance/preempted")
        expect(status)
        return time.time() + self.notice_s if text.strip() == "TRUE" else None

    def _ask(self, what: str) -> tuple[int, str]:
        return ask(f"{self.server}/computeMetadata/v1/{what}", {"Metadata-Flavor": "Google"})


CLOUDS: dict[str, type[Cloud]] = {"aws": Aws, "gcp": Gcp}


def find_cloud(server: str, name: str) -> Cloud:
    """The cloud of this machine; `name` is one of CLOUDS, or `auto`. Raises UserError where it is not there."""
    wanted = [cloud(server) for known, cloud in CLOUDS.items() if name in ("auto", known)]
    problem = "it knows none of their questions"
    for turn in range(TRIES):
        try:
            for cloud in wanted:
                if cloud.is_here():
                    return cloud
        except OSError as error:
            problem = str(error)
        if turn + 1 < TRIES:
            time.sleep(PAUSE_S)
    raise UserError(
        f"{server} is no metadata server of {' or '.join(cloud.name for cloud in wanted)} ({problem}). On other "
        "machines there is nothing to watch; --cloud none waits for SIGTERM alone."
    )


def ask(url: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
    """Status and text. Raises OSError where nobody answers."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with OPENER.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def expect(status: int) -> None:
    """Raises OSError for anything but an answer."""
    if status != 200:
        raise OSError(f"status {status}")
