"""A Witten-Bell bigram model: the loss to beat, for whoever has learned more than pairs of tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lwray.data.shards import TokenStream


@dataclass(frozen=True, slots=True)
class BigramCounts:
    """Counts of a training text. All int64; pair codes are history * vocab_size + next token."""

    vocab_size: int
    tokens: NDArray[np.int64]
    """[vocab_size]: how often each token occurs."""
    follows: NDArray[np.int64]
    """[vocab_size]: how often each token is a history, c(h)."""
    types: NDArray[np.int64]
    """[vocab_size]: distinct tokens after each history, T(h)."""
    codes: NDArray[np.int64]
    """The pairs seen, sorted."""
    pairs: NDArray[np.int64]
    """How often each was seen, c(h, w)."""


def count_bigrams(text: NDArray[np.int64], vocab_size: int) -> BigramCounts:
    """Counts tokens and neighbouring pairs of a 1-D text."""
    codes, pairs = np.unique(text[:-1] * vocab_size + text[1:], return_counts=True)
    return BigramCounts(
        vocab_size,
        tokens=np.bincount(text, minlength=vocab_size),
        follows=np.bincount(text[:-1], minlength=vocab_size),
        types=np.bincount(codes // vocab_size, minlength=vocab_size),
        codes=codes,
        pairs=pairs,
    )


def probabilities(counts: BigramCounts, history: NDArray[np.int64], token: NDArray[np.int64]) -> NDArray[np.float64]:
    """P(token | history), elementwise, [n] float64: never zero, and it sums to 1 over all tokens."""
    total, distinct = counts.tokens.sum(), np.count_nonzero(counts.tokens)
    unigram = (counts.tokens[token] + distinct / counts.vocab_size) / (total + distinct)
    code = history * counts.vocab_size + token
    at = np.minimum(np.searchsorted(counts.codes, code), len(counts.codes) - 1)
    seen = np.where(counts.codes[at] == code, counts.pairs[at], 0)
    types, follows = counts.types[history], counts.follows[history]
    # a history never seen has c = T = 0: all that is left is the unigram
    known = (seen + types * unigram) / np.maximum(follows + types, 1)
    smoothed: NDArray[np.float64] = np.where(follows == 0, unigram, known)
    return smoothed


def witten_bell_nats(
    train: TokenStream, val: TokenStream, val_tokens: int, vocab_size: int, max_train_tokens: int = 50_000_000
) -> float:
    """Mean nats a token over the targets val[1 : val_tokens + 1], each given the token before it.

    Interpolated Witten-Bell smoothing: P(w|h) = (c(h,w) + T(h) P1(w)) / (c(h) + T(h)), with T(h) the distinct
    tokens after h and P1 the unigram of the same form over the uniform distribution. Witten and Bell, "The
    zero-frequency problem: estimating the probabilities of novel events in adaptive text compression", IEEE
    Transactions on Information Theory 37(4), 1991; in this form Chen and Goodman, "An empirical study of
    smoothing techniques for language modeling", 1998. Counts the first `max_train_tokens` of `train`, at
    about 24 bytes of memory each.
    """
    counts = count_bigrams(train.read(0, min(len(train), max_train_tokens)), vocab_size)
    text = val.read(0, val_tokens + 1)
    return float(-np.log(probabilities(counts, text[:-1], text[1:])).mean())
