"""A tiny run of the `lm` task behind the command line, for tests that go through the same door as users."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lwray.cli import main
from lwray.errors import ExitCode

RUN_FILE = """
[data]
source = "{text}"
tokenizer = "bytes"

[model]
layers = 1
width = 32
heads = 2
context = 32

[batch]
global_size = 8

[train]
steps = 6

[tracking]
enabled = false
"""


class Door:
    """`tiny.toml`, the text that it trains on, and a storage, below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "tiny.toml"
        self.storage = root / "runs"
        self.text = root / "text.txt"

    def write(self) -> "Door":
        """About 40 kB of text, and the run file."""
        words = random.Random(0)
        self.text.write_text("".join(words.choice(["alpha ", "beta ", "gamma ", "delta\n"]) for _ in range(7000)))
        self.config.write_text(RUN_FILE.format(text=self.text))
        return self

    def train(self, *arguments: str, launcher: str = "inline") -> int:
        """The exit code of `lwray train tiny.toml …` into the storage."""
        return main(["train", str(self.config), "--launcher", launcher, "--storage", str(self.storage), *arguments])


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path in it."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """A run in this process takes over its signals, threads and environment; afterwards they are as before."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    threads, environment = torch.get_num_threads(), dict(os.environ)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Every test of a module that imports this leaves the process as it was."""
    with process_as_it_was():
        yield


@pytest.fixture(scope="module", name="trained")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the run `tiny`: out of hours after its second step, then gone on with to the end."""
    door = Door(tmp_path_factory.mktemp("door")).write()
    with process_as_it_was():
        assert door.train("data.log_ids=true", "train.max_hours=1e-9") == ExitCode.FINISHED
        assert door.train("data.log_ids=true", "train.max_hours=1") == ExitCode.FINISHED
    return door.root


@pytest.fixture(name="door")
def copy_of_trained(trained: Path, tmp_path: Path) -> Door:
    """A copy of the trained run, to change; a module may have another `trained`."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return Door(tmp_path)


@pytest.fixture(name="fresh")
def fresh_door(tmp_path: Path) -> Door:
    """A run file and its text, and no run yet."""
    return Door(tmp_path).write()
