"""Tokenisers: a byte-level BPE trained here, plain bytes, a tokenizer.json, or one from Hugging Face."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lwray.data.shards import replacing
from lwray.errors import UserError

END_OF_TEXT = "<|endoftext|>"
# how tokenisers of well-known models call the end of a document
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A `tokenizers.Tokenizer` with the id that ends a document."""

    inner: Tokenizer
    eot: int

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, because the ids of some tokenisers have gaps."""
        return int(max(self.inner.get_vocab(with_added_tokens=True).values())) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """One 1-D array a text, without tokens for its beginning or end."""
        encoded = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json, which `tokenizers` and `transformers` load."""
        with replacing(path) as file:
            file.write(self.inner.to_str(pretty=True).encode())

    def save_pretrained(self, directory: Path, context: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json, with which `transformers.AutoTokenizer` gives a text the
        ids of `encode_batch`: nothing added at its ends, special tokens that it spells out read as text.

        `context` is the number of tokens that the model takes.
        """
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer.from_str(self.inner.to_str())
        # what adds tokens at the ends
        inner.post_processor = None
        PreTrainedTokenizerFast(
            tokenizer_object=inner,
            eos_token=inner.id_to_token(self.eot),
            model_max_length=context,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(directory)

    def digest(self) -> str:
        """Changes with every id that a text may get."""
        return f"{xxhash.xxh3_64_hexdigest(self.inner.to_str().encode())}:{self.eot}"


def find_tokenizer(name: str) -> TextTokenizer:
    """The tokeniser called `bytes`, a path or `hf://NAME`. Raises UserError where there is none."""
    if name == "bytes":
        return byte_tokenizer()
    if name.startswith("hf://"):
        return _from_hub(name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"data.tokenizer {name!r} is none of bpe, bytes, hf://NAME and an existing tokenizer.json")
    return load_tokenizer(path)


def load_tokenizer(path: Path, eot: int | None = None) -> TextTokenizer:
    """Reads a tokenizer.json; the token that ends a document is looked up by its usual names unless given."""
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(f"data.tokenizer: {path} is not a tokenizer.json: {error}") from None
    return _wrapped(inner, _end_of(inner, path) if eot is None else eot)


def saved_tokenizer(path: Path, eot: int) -> TextTokenizer:
    """`load_tokenizer`, once a process for the same file: a worker tokenises many units."""
    return _loaded_once(path, eot, path.stat().st_mtime_ns)


def prepared_tokenizer(path: Path) -> TextTokenizer:
    """The tokeniser of a prepared data set, which keeps the id that ends a document beside it."""
    return load_tokenizer(path, json.loads(path.with_name("eot.json").read_text()))


@lru_cache(maxsize=2)
def _loaded_once(path: Path, eot: int, _written: int) -> TextTokenizer:
    return load_tokenizer(path, eot)


def byte_tokenizer() -> TextTokenizer:
    """Token b is byte b; 256 ends a document."""
    letters = _byte_letters()
    inner = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    return _wrapped(inner, _end_of(inner, "bytes"))


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens: 256 bytes, the end of a document, and merges."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(texts, trainer=trainer)
    return _wrapped(inner, _end_of(inner, "bpe"))


def _from_hub(name: str) -> TextTokenizer:
    from transformers import AutoTokenizer

    try:
        whole = AutoTokenizer.from_pretrained(name.removeprefix("hf://"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer {name} cannot be loaded: {' '.join(str(error).split())}") from error
    if not whole.is_fast:
        raise UserError(f"data.tokenizer {name} has no tokenizer.json; convert it to one first")
    inner = Tokenizer.from_str(whole.backend_tokenizer.to_str())
    return _wrapped(inner, _end_of(inner, name) if whole.eos_token_id is None else whole.eos_token_id)


def _wrapped(inner: Tokenizer, eot: int) -> TextTokenizer:
    # a corpus may spell out a special token, which must not end a document there
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return TextTokenizer(inner, eot)


def _end_of(inner: Tokenizer, where: object) -> int:
    ids = [inner.token_to_id(end) for end in ENDS]
    known = [each for each in ids if each is not None]
    if not known:
        raise UserError(
            f"data.tokenizer: {where} has no token that ends a document (one of {', '.join(ENDS)}); add one"
        )
    return int(known[0])


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenisers write for each byte, by byte: GPT-2's table."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    letter = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letter[byte] for byte in range(256)]
