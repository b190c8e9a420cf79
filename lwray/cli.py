"""The `lwray` command: parse, call, print. What takes long to import is imported by the command that needs it."""

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lwray import __version__
from lwray.cluster.commands import add_commands
from lwray.errors import ExitCode, RunFailed, UserError

if TYPE_CHECKING:
    from lwray.tracking.rundir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Without `argv` it is a program of its own, which may start others."""
    arguments = parse(argv)
    arguments.is_program = argv is None
    try:
        code: int = arguments.command(arguments)
    except UserError as error:
        print(f"lwray: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except RunFailed as error:
        print(f"lwray: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # the reader (`| head`) has what it wanted; what is still buffered must not raise at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FINISHED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        print(f"lwray: {error}. Make room, and run the same command again: nothing else is lost.", file=sys.stderr)
        return ExitCode.FAILED
    return code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, with `section.key=value` allowed before, between and after the options."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    strange = [text for text in rest if text.startswith("-") or "=" not in text]
    if strange or (rest and not {"overrides", "source"} & vars(arguments).keys()):
        top.error(f"unrecognized arguments: {' '.join(strange or rest)}")
    if "source" in arguments:
        arguments.source += rest
    elif "overrides" in arguments:
        words = [str(arguments.config), *arguments.overrides, *rest] if arguments.config else rest
        # the run file is the first word that sets nothing, wherever it stands
        files = [word for word in words if "=" not in word][:1]
        arguments.config = Path(files[0]) if files else arguments.config
        arguments.overrides = [word for word in words if word not in files]
    return arguments


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="lwray", description="Trains models on Ray clusters whose machines come and go.")
    top.add_argument("--version", action="version", version=f"lwray {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a run; again, it goes on where it stopped")
    add_config(train)
    train.add_argument("--storage", help="where runs are kept (over LWRAY_STORAGE and run.storage)")
    train.add_argument("--fresh", action="store_true", help="set an existing run of this name aside and start over")
    train.add_argument(
        "--launcher",
        choices=("ray", "torchrun", "inline"),
        default="ray",
        help="ray: Ray Train workers; torchrun: under torchrun; inline: this process alone, for a debugger",
    )
    train.set_defaults(command=run_train)

    prepare = commands.add_parser("prepare", help="tokenise text into shards, on Ray Data; again, it goes on")
    prepare.add_argument(
        "source", nargs="+", help="files, directories, globs, hf://NAME, python:stdlib; data.key=value"
    )
    prepare.add_argument("--out", type=Path, required=True, help="the directory of the shards; use it as data.source")
    prepare.set_defaults(command=run_prepare)

    config = commands.add_parser("config", help="every value of a run with its origin, or every key there is")
    add_config(config, optional=True)
    config.add_argument("--keys", action="store_true", help="every key: type, unit, default, kind and why")
    config.add_argument("--schema", action="store_true", help="a JSON schema of run files, for editors")
    config.set_defaults(command=run_config)

    show = commands.add_parser("show", help="one run: attempts, losses, checkpoints and their health")
    show.add_argument("run", help="a run's directory or URL, or its name in the storage")
    show.add_argument(
        "--verify", action="store_true", help="read every byte of each checkpoint; exit code 1 if damaged"
    )
    what = show.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="the overview as JSON")
    for merged in ("metrics", "ledger", "ids"):
        what.add_argument(
            f"--{merged}",
            dest="merged",
            action="store_const",
            const=merged,
            help=f"all attempts' {merged}, merged",
        )
    what.add_argument("--plot", type=Path, metavar="FILE", help="draw losses and speed into a PNG, SVG or PDF")
    show.set_defaults(command=run_show)

    export = commands.add_parser("export", help="weights and tokeniser as a directory that transformers loads")
    export.add_argument("run", help="a run's directory or URL, or its name in the storage")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory to make")
    state = export.add_mutually_exclusive_group()
    state.add_argument("--step", type=int, metavar="N", help="the state after N steps, instead of the newest")
    state.add_argument("--best", action="store_true", help="the state of lowest validation loss")
    export.set_defaults(command=run_export)

    add_commands(commands, add_config)
    return top


def add_config(command: argparse.ArgumentParser, optional: bool = False) -> None:
    """The run file and what is laid over it."""
    command.add_argument("config", type=Path, nargs="?" if optional else None, help="the run file (TOML)")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="values over the file's")
    command.add_argument("--on", type=Path, metavar="SITE", help="a site file (place and speed keys) over the run's")


def run_train(arguments: argparse.Namespace) -> int:
    """`lwray train`"""
    from lwray.cluster.supervise import Driver, Supervisor
    from lwray.cluster.threads import spin_briefly
    from lwray.config import load

    spin_briefly()
    supervised = arguments.is_program and arguments.launcher == "ray"
    driver = Driver.of_environment() if supervised else Driver()
    if driver:
        driver.die_with_parent()
    resolved = load(arguments.config, arguments.overrides, arguments.on)
    if driver is None:
        return Supervisor(resolved.config, arguments.storage).supervise()
    if arguments.launcher == "torchrun":
        if "WORLD_SIZE" not in os.environ:
            raise UserError("--launcher torchrun: start it as `torchrun --nproc-per-node N -m lwray train …`.")
        if os.environ["RANK"] != "0":
            from lwray.cluster.launcher import Torchrun

            Torchrun().follow()
            return ExitCode.FINISHED
    from lwray.cluster.drive import Options, drive

    fresh = arguments.fresh and not driver.opened
    return drive(resolved, Options(arguments.storage, fresh, arguments.launcher, driver.restarted))


def run_prepare(arguments: argparse.Namespace) -> int:
    """`lwray prepare`"""
    from lwray.cluster.prepare import ray_data_runner
    from lwray.config import load_data
    from lwray.data.prepare import prepare

    if "://" in str(arguments.out) or str(arguments.out).startswith(("s3:/", "gs:/")):
        raise UserError("--out is a directory; runs on an object store keep what they prepare there by themselves.")
    keys = [text for text in arguments.source if text.startswith("data.") and "=" in text]
    sources = [text for text in arguments.source if text not in keys]
    data = load_data(sources, keys)
    prepared = prepare(data, arguments.out, ray_data_runner(progress=True), directory=arguments.out)
    print(
        f"{prepared.directory}: {prepared.train_tokens:,} training and {prepared.val_tokens:,} held-out tokens, "
        f"vocabulary {prepared.vocab_size:,}. Train on it with data.source={prepared.directory}"
    )
    return ExitCode.FINISHED


def run_config(arguments: argparse.Namespace) -> int:
    """`lwray config`"""
    from lwray.config import describe, load

    if arguments.schema:
        print(json.dumps(describe.json_schema(), indent=2))
    elif arguments.keys:
        print(describe.keys_table())
    elif arguments.config:
        print(describe.values_table(load(arguments.config, arguments.overrides, arguments.on)))
    else:
        raise UserError("Give a run file, or --keys, or --schema.")
    return ExitCode.FINISHED


def run_show(arguments: argparse.Namespace) -> int:
    """`lwray show`"""
    from lwray.tracking import show

    run = show.find_run(arguments.run)
    if arguments.verify and (arguments.merged or arguments.plot):
        raise UserError("--verify is of the overview and --json; the other options read no checkpoint.")
    if arguments.merged:
        for line in show.jsonl(run, arguments.merged):
            print(line)
    elif arguments.plot:
        from lwray.tracking.plot import plot

        plot(run, arguments.plot)
        print(arguments.plot)
    else:
        show_overview(run, arguments.json, arguments.verify)
    return ExitCode.FINISHED


def show_overview(run: "RunDir", as_json: bool, verify: bool) -> None:
    """`lwray show RUN`, with `--json` or without. Raises RunFailed where `verify` finds damage, or cannot read."""
    from lwray.checkpoint.health import checkpoints
    from lwray.store import open_store
    from lwray.tracking import show

    rows = checkpoints(open_store(run.checkpoints_place), verify=verify)
    fields = [asdict(row) for row in rows]
    if as_json:
        print(json.dumps(show.overview(run, fields), indent=2))
    else:
        from rich.console import Console

        Console().print(show.tables(run, fields))
    if verify and (unknown := [row for row in rows if row.health == "unknown"]):
        names = ", ".join(row.name for row in unknown)
        raise RunFailed(f"Not verified: {names}. The storage does not answer: {unknown[0].reason}. Try again later.")
    if verify and (damaged := [row.name for row in rows if row.damaged]):
        raise RunFailed(
            f"Damaged: {', '.join(damaged)}. A start goes on from the newest whole checkpoint; "
            "restore these from a copy where you need them."
        )


def run_export(arguments: argparse.Namespace) -> int:
    """`lwray export`"""
    from lwray.engine.export import export
    from lwray.tracking.show import find_run

    step = "newest" if arguments.step is None else str(arguments.step)
    done = export(find_run(arguments.run), arguments.out, "best" if arguments.best else step)
    loss = "not evaluated" if done.val_loss is None else f"validation loss {done.val_loss:.4f}"
    print(f"{done.directory}: {done.run} after {done.step} steps ({loss}), a {done.network}.")
    if done.network.endswith("ForCausalLM") and not done.tokenizer:
        print("It has no tokenizer: the run was given token ids. Put the tokenizer that made them beside the weights.")
    return ExitCode.FINISHED
