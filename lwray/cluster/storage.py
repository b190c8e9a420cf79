"""Where runs are kept, by what stands on the command line, in the environment and in the run file."""

import os
import re
from pathlib import Path

from lwray.config import Config
from lwray.errors import UserError
from lwray.store.client import Limits
from lwray.store.retry import Retry

PROBING = Limits(read_seconds=10.0, request_seconds=20.0, retry=Retry(patience=5.0))
"""Whoever starts a run with a wrong endpoint should not wait for a minute."""
SECRETS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_CLIENT_SECRET",
)
"""Names under which the packages of object stores take credentials."""


def named_storage(option: str | None, config: Config, *, joins_cluster: bool) -> str:
    """`--storage` over LWRAY_STORAGE over `run.storage`. Raises UserError for what can be none, wherever it is."""
    if shown := sorted(name for name in config.env if name in SECRETS):
        raise UserError(
            f"[env] holds {', '.join(shown)}, and what stands there is written into each attempt's config.toml. Give "
            "credentials in the environment of the driver and of every node, or by a profile or role of the machine."
        )
    if option == "":
        raise UserError(
            "--storage is empty: is a variable of your shell not set? Without the option it is run.storage."
        )
    named = option or os.environ.get("LWRAY_STORAGE") or config.run.storage
    if re.match(r"[A-Za-z0-9]+:/[^/]", named):
        raise UserError(f"The storage {named} is neither a path nor a URL: write {named.replace(':/', '://', 1)}.")
    if joins_cluster and "://" not in named and not Path(named).expanduser().is_absolute():
        raise UserError(
            f"The storage {named!r} is a relative path, and this run joins a cluster, where a job's working "
            "directory is a copy that is thrown away. Give an absolute path that every node sees, such as "
            "--storage /shared/runs."
        )
    return named
