"""The decoder: its size, what a token can see, where positions enter, and how it starts."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lwray.models.transformer import Shape, Transformer, default_ff_width, rope_tables, rotate

SMALL = Shape(vocab=256, layers=2, width=32, heads=4, kv_heads=4, ff_width=64, context=24)


def started(shape: Shape = SMALL, seed: int = 0) -> Transformer:
    model = Transformer(shape)
    model.initialise(seed)
    return model


def tokens(rows: int = 2, length: int = 24, vocab: int = 256) -> Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(5))


def formula(shape: Shape) -> int:
    """Parameters with a table of exactly `vocab` rows."""
    head_dim = shape.width // shape.heads
    attention = shape.width * head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    matrices = 3 if shape.activation == "swiglu" else 2
    norms = 2 * shape.width + (2 * head_dim if shape.qk_norm else 0)
    block = attention + matrices * shape.width * shape.ff_width + norms
    tables = (1 if shape.tied else 2) * shape.vocab * shape.width
    return shape.layers * block + tables + shape.width


def counted(shape: Shape) -> int:
    """Parameters of the module without the rows that pad its tables to a multiple of 128."""
    with torch.device("meta"):
        model = Transformer(shape)
    padding = (shape.padded_vocab - shape.vocab) * shape.width * (1 if shape.tied else 2)
    return sum(parameter.numel() for parameter in model.parameters()) - padding


@pytest.mark.parametrize(
    ("shape", "parameters", "millions"),
    [
        (Shape(50257, 24, 1024, 16, 16, 4096, 1024), 454_166_528, "454.17"),
        (Shape(32000, 4, 512, 8, 8, 1344, 1024, tied=False), 45_224_448, "45.22"),
        (Shape(32000, 16, 1024, 16, 16, 2752, 1024, tied=False), 267_944_960, "267.94"),
    ],
)
def test_sizes_that_people_quote(shape: Shape, parameters: int, millions: str) -> None:
    assert formula(shape) == counted(shape) == parameters
    assert f"{parameters / 1e6:.2f}" == millions


@given(
    vocab=st.integers(1, 600),
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    activation=st.sampled_from(["swiglu", "relu2"]),
    qk_norm=st.booleans(),
    tied=st.booleans(),
)
@settings(max_examples=25)
def test_every_option_adds_the_parameters_it_says(
    vocab: int, layers: int, kv_heads: int, activation: str, qk_norm: bool, tied: bool
) -> None:
    shape = Shape(vocab, layers, 32, 4, kv_heads, 48, 16, activation, qk_norm, tied)
    assert counted(shape) == formula(shape)
    assert shape.padded_vocab % 128 == 0
    assert 0 <= shape.padded_vocab - vocab < 128


def test_the_default_feed_forward_is_eight_thirds_of_the_width_in_64s() -> None:
    assert [default_ff_width(width) for width in (512, 1024, 4096)] == [1408, 2752, 10944]


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, kv_heads=2, qk_norm=True, activation="relu2", tied=False)])
def test_a_token_changes_no_logits_before_it(shape: Shape) -> None:
    model = started(shape)
    first = tokens()
    for changed in (0, 11, 23):
        second = first.clone()
        second[:, changed] = (second[:, changed] + 1) % 256
        a, b = model(first), model(second)
        assert torch.equal(a[:, :changed], b[:, :changed])
        assert not torch.equal(a[:, changed], b[:, changed])
    assert model(first).shape == (2, 24, 256)


def test_logits_of_a_prefix_are_those_of_the_whole() -> None:
    model = started()
    torch.testing.assert_close(model(tokens()[:, :7]), model(tokens())[:, :7], rtol=1e-4, atol=1e-6)


def test_rows_do_not_see_each_other() -> None:
    model = started()
    torch.testing.assert_close(model(tokens()[1:]), model(tokens())[1:], rtol=1e-4, atol=1e-6)


def test_a_rotated_product_depends_on_the_distance_of_its_tokens_alone() -> None:
    cos, sin = (table.double() for table in rope_tables(64, 16, 10000.0))
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    everywhere = (1, 64, 1, 16)
    rotated_q = rotate(q.expand(everywhere), cos, sin)[0, :, 0]
    rotated_k = rotate(k.expand(everywhere), cos, sin)[0, :, 0]
    products = rotated_q @ rotated_k.T
    for distance in range(-40, 41):
        diagonal = products.diagonal(distance)
        # the tables are float32
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-4)
    assert float(products[0].std()) > 0.1
    torch.testing.assert_close(rotated_q.norm(dim=1), q.norm().expand(64), rtol=1e-6, atol=0)
    torch.testing.assert_close(rotated_q[0], q)


def test_attention_sees_the_order_of_tokens_by_their_rotation_alone() -> None:
    # one block: in a second one, tokens differ by what they could see in the first
    model = started(replace(SMALL, layers=1))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.ndim > 1 else 1)
    first = tokens(1, 8)
    swapped = first[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert not torch.allclose(model(first)[:, -1], model(swapped)[:, -1], atol=1e-3)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_attention_is_attention_with_its_key_and_value_heads_repeated(kv_heads: int) -> None:
    grouped = started(replace(SMALL, kv_heads=kv_heads))
    full = Transformer(SMALL)
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            by_head = weight.view(kv_heads, 8, 32)
            state[name] = by_head.repeat_interleave(4 // kv_heads, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=1e-4, atol=1e-6)


def test_initial_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = started(seed=3)
    torch.manual_seed(2)
    torch.randn(100)
    second = Transformer(SMALL)
    before = torch.get_rng_state()
    second.initialise(3)
    assert torch.equal(torch.get_rng_state(), before)
    second.initialise(3)
    other = started(seed=4)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, second.get_parameter(name))
        assert weight.ndim < 2 or not torch.equal(weight, other.get_parameter(name))


def test_a_weight_starts_the_same_whatever_was_created_before_it() -> None:
    tied, untied = started(), started(replace(SMALL, tied=False, qk_norm=True, activation="relu2"))
    for name, weight in untied.named_parameters():
        if weight.ndim >= 2 and name in dict(tied.named_parameters()):
            assert torch.equal(weight, tied.get_parameter(name))


def test_no_two_weights_start_alike() -> None:
    model = started(replace(SMALL, layers=6))
    firsts = [p.detach().flatten()[0].item() for p in model.parameters() if p.ndim >= 2]
    assert len(set(firsts)) == len(firsts)


def test_weights_start_at_two_hundredths_and_smaller_where_a_branch_joins_the_stream() -> None:
    model = started(replace(SMALL, layers=8, width=128, ff_width=256))
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            assert bool((weight == 1).all())
            continue
        joins = name.endswith(("attention.out.weight", "ff.down.weight"))
        assert float(weight.detach().std()) == pytest.approx(0.02 / 4 if joins else 0.02, rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_decoder_predicts_near_uniformly(tied: bool) -> None:
    model = started(Shape(512, 4, 64, 4, 2, 128, 64, tied=tied))
    text = tokens(8, 64, 512)
    loss = F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(512), abs=0.1)


def test_dropout_sits_on_both_branches_of_every_block() -> None:
    model = started(replace(SMALL, dropout=0.3))
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.3] * 4
