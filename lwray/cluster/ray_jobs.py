"""Jobs of a Ray cluster that stands, through its dashboard and with the token that it asks for."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from lwray.errors import RunFailed, UserError

ADDRESS = "RAY_API_SERVER_ADDRESS"
"""Ray's own name for it, which wins over RAY_ADDRESS and over what its client is given."""
POLL_S = 1.0
TALKATIVE = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
"""Loggers that name every file which is not sent."""


class NoAnswer(UserError):
    """Nobody answers, or not any more."""


class RayJobs:
    """The jobs of one cluster. Every method raises UserError where the cluster does not answer, or refuses."""

    def __init__(self, address: str | None) -> None:
        """`address` over RAY_API_SERVER_ADDRESS: the dashboard's, `http://HEAD:8265`."""
        self.address = dashboard(address)
        os.environ[ADDRESS] = self.address
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        with self._answers():
            self._client = JobSubmissionClient(self.address)

    def all(self) -> list[JobDetails]:
        """Every submitted job that the cluster knows, the oldest first."""
        with self._answers():
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: job.start_time or 0)

    def of_run(self, run: str) -> dict[int, JobDetails]:
        """The jobs that `lwray submit` made for a run, by number."""
        numbered = {number_of(job.submission_id, run): job for job in self.all()}
        return {number: job for number, job in numbered.items() if number is not None}

    def alive(self, run: str) -> JobDetails | None:
        """The run's job that waits or runs, if there is one."""
        return next((job for job in self.of_run(run).values() if not job.status.is_terminal()), None)

    def submit(self, submission_id: str, entrypoint: str, runtime_env: Mapping[str, Any]) -> None:
        """Send what `working_dir` names, and have the cluster run the command. Raises RunFailed where it broke off."""
        try:
            with self._answers():
                self._client.submit_job(
                    entrypoint=entrypoint, submission_id=submission_id, runtime_env=dict(runtime_env), metadata={}
                )
        except NoAnswer as error:
            raise RunFailed(
                f"{error} Whether it has taken job {submission_id}, `lwray ls --address {self.address}` says."
            ) from None

    def stop(self, submission_id: str, seconds: float, say: Callable[[str], None]) -> str:
        """Ask a job to end, and wait until it has; returns Ray's word for how. Raises RunFailed after `seconds`."""
        with self._answers():
            self._client.stop_job(submission_id)
        say(f"Job {submission_id} is asked to commit and end.")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._answers():
                status = self._client.get_job_status(submission_id)
            if status.is_terminal():
                return str(status)
            time.sleep(POLL_S)
        raise RunFailed(f"Job {submission_id} was asked to end {seconds:.0f} s ago, and is {status} still.")

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise UserError(f"{self._about_token(error)} {GIVE_TOKEN}") from None
        except (ConnectionError, requests.exceptions.RequestException) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise NoAnswer(
                f"No Ray cluster answers at {self.address} ({reason}). The address is its dashboard's, such as "
                "http://HEAD:8265."
            ) from None
        except (RuntimeError, ValueError) as error:
            # ValueError: a runtime environment that cannot be sent
            raise UserError(f"The cluster at {self.address} refuses: {str(error).strip()}") from None

    def _about_token(self, error: AuthenticationError) -> str:
        if "Authentication required" in str(error) or "no authentication token" in str(error):
            return f"The cluster at {self.address} asks for a token, and none was sent."
        return f"The cluster at {self.address} does not take the token that was sent."


GIVE_TOKEN = "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's own."


def dashboard(address: str | None) -> str:
    """Raises UserError where no cluster is named, or by another address than its dashboard's."""
    named = address or os.environ.get(ADDRESS, "")
    if not named:
        raise UserError(f"Which cluster? Give --address http://HEAD:8265 (its dashboard), or set {ADDRESS}.")
    if not re.match(r"https?://", named):
        raise UserError(f"{named} is not the address of a dashboard, which begins with http:// (http://HEAD:8265).")
    return named.rstrip("/")


def number_of(submission_id: str, run: str) -> int | None:
    """Of `RUN-3` the 3; None for what is no job of this run."""
    stem, _, number = submission_id.rpartition("-")
    return int(number) if stem == run and number.isdecimal() else None
