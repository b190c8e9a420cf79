"""The Witten-Bell bigram: a proper distribution, and the same numbers as a plain implementation."""

import itertools
from collections import Counter, defaultdict
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from lwray.data.bigram import count_bigrams, probabilities, witten_bell_nats
from lwray.data.shards import TokenStream, whole_shard, write_shard

VOCAB = 12


def stream(path: Path, tokens: np.ndarray) -> TokenStream:
    write_shard(path, tokens, VOCAB)
    return TokenStream([whole_shard(path)])


def skewed(count: int, seed: int) -> np.ndarray:
    # the largest two ids never occur, so that unseen tokens and unseen histories are met
    return np.minimum(np.random.default_rng(seed).geometric(0.3, count) - 1, VOCAB - 3)


def naive_nats(train: list[int], val: list[int]) -> float:
    unigrams, after = Counter(train), defaultdict(Counter)
    for history, token in itertools.pairwise(train):
        after[history][token] += 1
    nats = 0.0
    for history, token in itertools.pairwise(val):
        p = (unigrams[token] + len(unigrams) / VOCAB) / (len(train) + len(unigrams))
        if after[history]:
            seen = after[history]
            p = (seen[token] + len(seen) * p) / (seen.total() + len(seen))
        nats -= log(p)
    return nats / (len(val) - 1)


def test_it_sums_to_one_over_the_vocabulary_for_every_history() -> None:
    counts = count_bigrams(skewed(400, 0), VOCAB)
    history, token = np.repeat(np.arange(VOCAB), VOCAB), np.tile(np.arange(VOCAB), VOCAB)
    p = probabilities(counts, history, token)
    assert p.min() > 0
    assert p.reshape(VOCAB, VOCAB).sum(1) == pytest.approx(1.0)


def test_it_equals_a_plain_implementation(tmp_path: Path) -> None:
    train, val = skewed(300, 1), np.random.default_rng(2).integers(0, VOCAB, 200)
    got = witten_bell_nats(stream(tmp_path / "t.bin", train), stream(tmp_path / "v.bin", val), 199, VOCAB)
    assert got == pytest.approx(naive_nats(train.tolist(), val.tolist()), rel=1e-12)


def test_it_scores_only_the_asked_targets_and_counts_only_the_asked_tokens(tmp_path: Path) -> None:
    train, val = skewed(300, 1), skewed(200, 2)
    streams = stream(tmp_path / "t.bin", train), stream(tmp_path / "v.bin", val)
    got = witten_bell_nats(*streams, 50, VOCAB, max_train_tokens=100)
    assert got == pytest.approx(naive_nats(train[:100].tolist(), val[:51].tolist()), rel=1e-12)


def test_a_text_that_repeats_a_pair_is_nearly_free(tmp_path: Path) -> None:
    text = np.tile([3, 5], 2000)
    streams = stream(tmp_path / "t.bin", text), stream(tmp_path / "v.bin", text)
    assert exp(-witten_bell_nats(*streams, 1000, VOCAB)) > 0.999
