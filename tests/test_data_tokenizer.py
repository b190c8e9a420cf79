"""Tokenisers give back the text, are the same every time, and load from wherever they may lie."""

from pathlib import Path

import pytest

from lwray.data.tokenizer import TextTokenizer, byte_tokenizer, find_tokenizer, load_tokenizer, train_bpe
from lwray.errors import UserError

TEXTS = [
    "The old mill stood by the old river.\n" * 30,
    "Größe, 東京, 🙂\r\n\ttabs\x00",
    "<|endoftext|> is only text",
]


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_bpe(TEXTS, 300)


@pytest.mark.parametrize("text", [*TEXTS, "", "unseen: ÿ þ \u2028"])
def test_both_tokenisers_give_back_any_text(bpe: TextTokenizer, text: str) -> None:
    for tokenizer in (bpe, byte_tokenizer()):
        [ids] = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eot not in ids


def test_byte_tokens_are_the_bytes() -> None:
    text = "aé🙂\n\x00 x"
    assert byte_tokenizer().encode_batch([text])[0].tolist() == list(text.encode())
    assert (byte_tokenizer().vocab_size, byte_tokenizer().eot) == (257, 256)


def test_training_twice_gives_the_same_tokeniser(bpe: TextTokenizer) -> None:
    again = train_bpe(iter(TEXTS), 300)
    assert again.digest() == bpe.digest()
    assert 257 < bpe.vocab_size <= 300
    assert len(bpe.encode_batch([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def test_a_saved_tokeniser_is_read_from_a_path_and_from_a_hub_directory(bpe: TextTokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    bpe.save(tmp_path / "tokenizer.json")
    hub = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>", model_max_length=8
    )
    hub.save_pretrained(tmp_path / "hub")
    for found in (
        find_tokenizer(str(tmp_path / "tokenizer.json")),
        find_tokenizer(f"hf://{tmp_path / 'hub'}"),
    ):
        assert (found.eot, found.vocab_size) == (bpe.eot, bpe.vocab_size)
        for text in TEXTS:
            assert found.encode_batch([text])[0].tolist() == bpe.encode_batch([text])[0].tolist()


def test_a_name_that_stands_for_nothing_is_refused_with_the_choices() -> None:
    with pytest.raises(UserError, match=r"'gtp2' is none of bpe, bytes, hf://NAME and an existing tokenizer.json"):
        find_tokenizer("gtp2")


def test_a_hub_name_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data.tokenizer hf://.*empty cannot be loaded"):
        find_tokenizer(f"hf://{tmp_path / 'empty'}")


def test_a_file_that_is_no_tokeniser_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
