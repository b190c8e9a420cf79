"""Where a run's files lie, and what makes it the same run at its next start."""

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

import lwray
from lwray.config import Config, Resolved, dotted, kind_of
from lwray.errors import UserError
from lwray.store import open_store
from lwray.tracking.secrets import masked

CLAIM = "claim"
PACKAGES = ("torch", "ray", "deepspeed", "mlflow", "transformers")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run and the directory that only it writes to. Picklable: workers are handed it."""

    number: int
    path: Path
    group: int = 1
    """Which of its groups of workers, one after the other; what the driver and a group tell each other has it."""

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def ids(self) -> Path:
        return self.path / "sample_ids.jsonl"

    @property
    def driver_ledger(self) -> Path:
        """The driver's own events, where it may be on another machine than rank 0."""
        return self.path / "driver.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def stop(self) -> Path:
        """While this file exists the group is asked to commit and end; it holds cause and deadline."""
        return self.path / f"stop-{self.group:02d}"

    @property
    def request(self) -> Path:
        """While this file exists the attempt is asked to commit and end, from outside: `lwray stop` leaves it."""
        return self.path / "stop"

    @property
    def life(self) -> Path:
        """Rank 0's last sign of life, while the group trains."""
        return self.path / f"life-{self.group:02d}.json"

    @property
    def stacks(self) -> Path:
        """What every rank was at when a group hung."""
        return self.path / "stacks"

    @property
    def outcome(self) -> Path:
        """What the group's workers left: how it ended, or why they failed."""
        return self.path / f"outcome-{self.group:02d}.json"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run, `<storage>/<run.name>`."""

    root: Path
    """Of a run on an object store, the place of its small files on this machine; its checkpoints are never in it."""
    url: str = ""
    """Of a run on an object store, where it is."""

    @property
    def place(self) -> str:
        """Where the run is, for people and for `open_store`: a path or a URL."""
        return self.url or str(self.root)

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def attempts_place(self) -> str:
        """Where attempts are claimed, for `open_store`."""
        return f"{self.place}/attempts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def checkpoints_place(self) -> str:
        """Where checkpoints are, for `open_store`."""
        return f"{self.place}/checkpoints"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def identity(self) -> Path:
        return self.root / "run.json"

    def attempts_in_order(self) -> list[Attempt]:
        """All attempts so far, by number."""
        if not self.attempts.is_dir():
            return []
        numbered = [Attempt(int(path.name), path) for path in self.attempts.iterdir() if path.name.isdigit()]
        return sorted(numbered, key=lambda attempt: attempt.number)

    def last_attempt(self) -> int:
        """The largest number so far; 0 where there is none."""
        earlier = self.attempts_in_order()
        return earlier[-1].number if earlier else 0

    def new_attempt(self, after: int = 0) -> Attempt:
        """Create the directory after the largest number, and after `after`; no two callers ever get the same one."""
        self.attempts.mkdir(parents=True, exist_ok=True)
        if self.url:
            return self._claim_attempt(after)
        while True:
            number = max(after, self.last_attempt()) + 1
            attempt = Attempt(number, self.attempts / f"{number:04d}")
            try:
                attempt.path.mkdir()
            except FileExistsError:
                continue  # another driver was faster: take the number after its own
            attempt.logs.mkdir()
            return attempt

    def _claim_attempt(self, after: int) -> Attempt:
        """On an object store, which has no directories, an object made exclusively is what only one caller gets."""
        store = open_store(self.attempts_place)
        claimed = False
        while not claimed:
            number = max(after, *(int(name) for name in store.names() if name.isdigit()), 0) + 1
            claimed = store.create(f"{number:04d}/{CLAIM}", json.dumps({"time": time.time()}).encode())
        attempt = Attempt(number, self.attempts / f"{number:04d}")
        attempt.logs.mkdir(parents=True)
        return attempt


def write_json(path: Path, obj: object) -> None:
    """Write `obj` as JSON so that a reader sees the old file or the new one, never a part."""
    write_text(path, json_text(obj))


def json_text(obj: object) -> str:
    """`obj` as the JSON that a run's files hold."""
    return json.dumps(obj, indent=2) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write `text` by way of `NAME.tmp`, synced and then renamed."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(path)


def read_json(path: Path) -> Any:
    """The JSON value in `path`. Raises FileNotFoundError, and UserError where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Restore it, or move it away.") from None


@dataclass(frozen=True, slots=True)
class Identity:
    """What must not change between two starts of a run, and its one MLflow run (run.json)."""

    maths: dict[str, Any]
    """The maths keys of the Config by dotted name, as JSON values."""
    data_fingerprint: str
    mlflow_run_id: str | None
    created: float
    """Unix seconds."""
    init: dict[str, Any] | None = None
    """What `init.from` meant at the first start; later ones must not find something newer."""

    @classmethod
    def read(cls, path: Path) -> "Identity":
        """Raises FileNotFoundError for a run that was never started."""
        return cls(**read_json(path))

    def text(self) -> str:
        return json_text(asdict(self))

    def write(self, path: Path) -> None:
        write_text(path, self.text())


def maths_of(config: Config) -> dict[str, Any]:
    """The keys that make it this run and no other, by dotted name, as JSON values."""
    plain = config.model_dump(mode="json", by_alias=True)
    return {key: _at(plain, key) for key, _ in dotted(config) if kind_of(key) == "maths"}


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, old, new) of every key whose value is not the same; None stands for a key that one side lacks."""
    keys = dict.fromkeys([*old, *new])
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def env_record(argv: Sequence[str]) -> dict[str, Any]:
    """What an attempt ran on: command, git, versions, machine. Never environment variables (secrets)."""
    record: dict[str, Any] = {
        "command": masked(shlex.join(argv)),
        "time": time.time(),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    commit = _git("rev-parse", "HEAD")
    if commit:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        record["git"] = {"commit": commit, "changed": bool(changed)}
    return record


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of lwray, and of those of `packages` that are installed."""
    found = {"lwray": lwray.__version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def set_aside(run_root: Path) -> Path:
    """Rename a run's directory to `NAME.old-<YYYYmmdd-HHMMSS>`, to free the name; returns the new path."""
    aside = run_root.with_name(f"{run_root.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
    return run_root.rename(aside)


def config_toml(resolved: Resolved) -> str:
    """The resolved configuration as TOML that loads to an equal Config, each key with its origin and kind."""
    return "\n".join(_toml_lines(resolved.config.model_dump(by_alias=True), resolved.origins)) + "\n"


def _toml_lines(tables: dict[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    for section, keys in tables.items():
        yield f"[{section}]"
        nested = {name: value for name, value in keys.items() if isinstance(value, dict)}
        for name, value in keys.items():
            if name not in nested:
                yield _toml_line(section, name, value, origins)
        for name, value in nested.items():
            yield f"\n# {_remark(f'{section}.{name}', origins)}"
            yield tomli_w.dumps({section: {name: value}}).rstrip("\n")
        yield ""


def _toml_line(section: str, name: str, value: object, origins: Mapping[str, str]) -> str:
    remark = _remark(f"{section}.{name}", origins)
    if value is None:
        return f"# {name} is not set  # {remark}"
    pair = tomli_w.dumps({name: 0}).removesuffix("0\n") + _literal(value)
    return f"{pair:<40}  # {remark}"


def _remark(key: str, origins: Mapping[str, str]) -> str:
    kind = "place" if key.startswith("env.") else kind_of(key)
    # a file's name may hold any character, a TOML comment no control character
    origin = "".join(c if c.isprintable() else "?" for c in origins.get(key, "default"))
    return f"{origin} ({kind})"


def _literal(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def _at(plain: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return plain[section][name] if name else plain[section]


def _git(*arguments: str) -> str:
    """What git says of the working directory; empty where there is no repository or no git."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
