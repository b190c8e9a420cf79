"""Prepares a data set: what the user names becomes token shards in a directory named after what went in.

Each unit of text is tokenised alone into its own shards, so any number of workers writes the same bytes, and
a preparation that was stopped goes on with the units that are missing.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
import xxhash

from lwray.config.schema import DataSection
from lwray.data.heldout import HeldOut, pieces, runs, share_of
from lwray.data.prepared import Prepared, claim, is_prepared, open_prepared, write_manifest
from lwray.data.shards import Shard, id_range, map_tokens, replacing, whole_shard
from lwray.data.sources import Unit, documents, find_units, kind_of, thin, token_files
from lwray.data.tokenise import TOKENIZER, Work, tokenise_unit
from lwray.data.tokenizer import TextTokenizer, find_tokenizer, saved_tokenizer, train_bpe
from lwray.errors import UserError

__all__ = ["Prepared", "UnitRunner", "Work", "open_prepared", "prepare", "serially"]

LAYOUT = 1
"""Goes up when the same source would become other tokens."""

WHOLE_DIGEST_BYTES = 256 << 20
DIGEST_SAMPLE_CHARS = 64 << 10
DIGEST_SAMPLE_TOKENS = 4096
BPE_SAMPLE_BYTES = 8_000_000
BPE_SAMPLE_UNITS = 64
BPE_SAMPLE_PIECE = 16 << 10
ALL_TRAIN, ALL_HELD_OUT = HeldOut(0, 0), HeldOut(0, 1)

UnitRunner = Callable[[Callable[[Work], None], Sequence[Work]], None]
"""Calls the function on every work, in any order and process, and returns when all are done."""


def serially(task: Callable[[Work], None], works: Sequence[Work]) -> None:
    """The UnitRunner of one process."""
    for work in works:
        task(work)


def prepare(
    data: DataSection, cache: Path, run_units: UnitRunner = serially, *, directory: Path | None = None
) -> Prepared:
    """The data set of `data` as token shards, made only if it is not there yet.

    It lies in `cache/<fingerprint>`, or in `directory` if that is given. Token shards are pointed at where
    they are; a prepared directory is taken as it is. Raises UserError on a source that cannot be read or is
    too short.
    """
    kind = kind_of(data.source, data)
    if kind == "prepared":
        return _taken_as_is(data, directory)
    if kind == "tokens":
        return _from_tokens(data, cache, directory)
    return _from_text(data, cache, run_units, directory)


def _from_text(data: DataSection, cache: Path, run_units: UnitRunner, directory: Path | None) -> Prepared:
    # set before first use, or tokenizers warns whenever this process forks
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    units = find_units(data.source, data, data.max_bytes)
    held_units = find_units(data.val_source, data) if data.val_source else ()
    cut = ALL_TRAIN if held_units else share_of(data.val_share, sum(unit.size for unit in units))
    given = None if data.tokenizer == "bpe" else find_tokenizer(data.tokenizer)
    tokenizer_key = given.digest() if given else f"bpe:{data.vocab_size}"
    fingerprint = _fingerprint(tokenizer_key, astuple(cut), _digest(units), _digest(held_units))
    target = claim(directory or cache / fingerprint[:16], fingerprint, shared=directory is None)
    if is_prepared(target):
        return open_prepared(target)

    tokenizer = _kept_tokenizer(target, lambda: given or train_bpe(_bpe_sample(units, cut), data.vocab_size))
    (target / "units").mkdir(exist_ok=True)
    cuts = [(unit, cut) for unit in units] + [(unit, ALL_HELD_OUT) for unit in held_units]
    works = [
        Work(index, unit, cut, target, tokenizer.eot, tokenizer.vocab_size) for index, (unit, cut) in enumerate(cuts)
    ]
    run_units(tokenise_unit, [work for work in works if not work.record.exists()])
    return _finished(works, target, fingerprint)


def _finished(works: Sequence[Work], directory: Path, fingerprint: str) -> Prepared:
    counts = [work.counts() for work in works]
    train = [Shard(work.shard("train"), 0, each.train_tokens) for work, each in zip(works, counts, strict=True)]
    val = [Shard(work.shard("val"), 0, each.val_tokens) for work, each in zip(works, counts, strict=True)]
    _check_lengths(train, val)
    return write_manifest(
        Prepared(
            directory=directory,
            train=tuple(shard for shard in train if len(shard)),
            val=tuple(shard for shard in val if len(shard)),
            vocab_size=works[0].vocab_size,
            train_tokens=sum(map(len, train)),
            val_tokens=sum(map(len, val)),
            train_bytes=sum(each.train_bytes for each in counts),
            val_bytes=sum(each.val_bytes for each in counts),
            tokenizer=directory / TOKENIZER,
            fingerprint=fingerprint,
        )
    )


def _check_lengths(train: Sequence[Shard], val: Sequence[Shard]) -> None:
    for what, shards in (("train on", train), ("hold out", val)):
        if sum(map(len, shards)) < 2:
            raise UserError(
                f"the source is too short: it leaves nothing to {what}; "
                "give more of it, held-out data in data.val_source, or another data.val_share"
            )


def _kept_tokenizer(directory: Path, make: Callable[[], TextTokenizer]) -> TextTokenizer:
    """The directory's tokeniser, made and saved on first use, so that going on does not train it again."""
    path, end = directory / TOKENIZER, directory / "eot.json"
    if not end.exists():
        made = make()
        made.save(path)
        with replacing(end) as file:
            file.write(json.dumps(made.eot).encode())
    return saved_tokenizer(path, json.loads(end.read_text()))


def _bpe_sample(units: Sequence[Unit], cut: HeldOut) -> Iterator[str]:
    """About 8 MB of training text, evenly spread over at most 127 units that are evenly spread themselves."""
    chosen = units[:: max(1, len(units) // BPE_SAMPLE_UNITS)]
    share = BPE_SAMPLE_BYTES / sum(unit.size for unit in chosen)
    texts = (text for unit in chosen for document in documents(unit) for held, text in runs(document, cut) if not held)
    return thin((piece for text in texts for piece in pieces(text, BPE_SAMPLE_PIECE)), len, share)


def _from_tokens(data: DataSection, cache: Path, directory: Path | None) -> Prepared:
    train = [whole_shard(path) for path in token_files(data.source)]
    val = [whole_shard(path) for path in token_files(data.val_source)]
    digests = [(str(shard.path), _token_digest(shard)) for shard in train + val]
    fingerprint = _fingerprint("tokens", data.vocab_size, data.val_share, len(val), digests)
    target = claim(directory or cache / fingerprint[:16], fingerprint, shared=directory is None)
    if is_prepared(target):
        return open_prepared(target)
    for shard in train + val:
        _check_ids(shard, data.vocab_size)
    if not val:
        train, val = _cut_tail(train, data.val_share)
    _check_lengths(train, val)
    return write_manifest(
        Prepared(
            directory=target,
            train=tuple(train),
            val=tuple(val),
            vocab_size=data.vocab_size,
            train_tokens=sum(map(len, train)),
            val_tokens=sum(map(len, val)),
            train_bytes=0,
            val_bytes=0,
            tokenizer=None,
            fingerprint=fingerprint,
        )
    )


def _check_ids(shard: Shard, vocab_size: int) -> None:
    low, high = id_range(shard)
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"{shard.path} has token id {low if low < 0 else high}, outside the vocabulary of {vocab_size}; "
            "set data.vocab_size to that of the tokeniser that wrote it"
        )


def _cut_tail(shards: Sequence[Shard], share: float) -> tuple[list[Shard], list[Shard]]:
    """The line of shards cut in two: the last `share` of its tokens is held out."""
    total = sum(map(len, shards))
    left = total - round(total * share)
    train, val = [], []
    for shard in shards:
        border = min(shard.start + left, shard.stop)
        train.append(Shard(shard.path, shard.start, border))
        val.append(Shard(shard.path, border, shard.stop))
        left -= border - shard.start
    return [shard for shard in train if len(shard)], [shard for shard in val if len(shard)]


def _taken_as_is(data: DataSection, directory: Path | None) -> Prepared:
    if len(data.source) != 1 or data.val_source:
        raise UserError(
            "a prepared directory is a whole data set: name it alone in data.source, without data.val_source"
        )
    if directory is not None:
        raise UserError(f"{data.source[0]} is prepared already; use it as data.source")
    return open_prepared(Path(data.source[0]).expanduser().resolve())


def _fingerprint(*facts: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([LAYOUT, *facts]).encode())


def _digest(units: Sequence[Unit]) -> str:
    """Of the units' borders and texts: all of a source up to 256 MiB, 64 KiB of each part of a larger one."""
    whole = sum(unit.size for unit in units) <= WHOLE_DIGEST_BYTES
    digest = xxhash.xxh3_128()
    for unit in units:
        digest.update(b"unit of %d\n" % len(unit.parts))
        for part in unit.parts:
            digest.update(b"part of %d\n" % part.size)
            chars = 0
            for document in part.documents():
                digest.update(b"document of %d\n" % len(document) + document.encode())
                chars += len(document)
                if not whole and chars >= DIGEST_SAMPLE_CHARS:
                    break
    return digest.hexdigest()


def _token_digest(shard: Shard) -> str:
    """Of the number of tokens and of 64 stretches evenly spread over them."""
    tokens = map_tokens(shard.path)
    digest = xxhash.xxh3_64(f"{len(tokens)} {tokens.dtype}".encode())
    for at in np.linspace(0, len(tokens), 64, dtype=np.int64).tolist():
        digest.update(tokens[at : at + DIGEST_SAMPLE_TOKENS].tobytes())
    return digest.hexdigest()
