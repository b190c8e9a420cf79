"""Law 3: a dropout mask is a function of (seed, step, row, place), and dropout that could not be one is refused."""

from collections.abc import Iterator
from itertools import pairwise
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lwray.errors import UserError
from lwray.models.draws import DROPOUT_PLACES, RowDropout, RowKeys, row_keys, uniform, use_row_dropout


def mask(keys: Tensor, place: int = 0, p: float = 0.5, features: int = 64) -> Tensor:
    """Which elements of [rows, features] are kept."""
    held = RowKeys()
    held.current = keys
    out: Tensor = RowDropout(p, place, held)(torch.ones(len(keys), features))
    return out != 0


def drop(model: nn.Module, keys: RowKeys, x: Tensor, positions: Tensor | None = None, step: int = 0) -> Tensor:
    keys.current = row_keys(7, step, torch.arange(len(x)) if positions is None else positions)
    out: Tensor = model(x)
    return out


@given(st.permutations(range(12)), st.lists(st.integers(1, 11), unique=True, max_size=5).map(sorted))
def test_a_row_has_its_mask_in_any_micro_batch_at_any_place_in_it(order: list[int], cuts: list[int]) -> None:
    whole = mask(row_keys(3, 8, torch.arange(12)))
    for start, stop in pairwise([0, *cuts, 12]):
        positions = torch.tensor(order[start:stop])
        assert torch.equal(mask(row_keys(3, 8, positions)), whole[positions])


def test_masks_differ_by_step_row_place_and_seed() -> None:
    keys = row_keys(3, 8, torch.arange(2))
    masks = [
        mask(keys)[0],
        mask(keys)[1],
        mask(keys, place=1)[0],
        mask(row_keys(3, 9, torch.arange(2)))[0],
        mask(row_keys(4, 8, torch.arange(2)))[0],
        mask(row_keys(8, 3, torch.arange(2)))[0],
    ]
    agreeing = [float((a == b).float().mean()) for i, a in enumerate(masks) for b in masks[:i]]
    # chance is 0.5, deviation 1 / 16
    assert all(0.25 < share < 0.75 for share in agreeing)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_p_and_the_mean_is_preserved(p: float) -> None:
    rows, features = 1000, 500
    keys = RowKeys()
    keys.current = row_keys(1, 2, torch.arange(rows))
    out = RowDropout(p, 3, keys)(torch.ones(rows, features))
    four_sigma = 4 * sqrt(p * (1 - p) / (rows * features))
    assert abs(float((out != 0).float().mean()) - (1 - p)) < four_sigma
    assert abs(float(out.double().mean()) - 1) < four_sigma / (1 - p)
    assert out[out != 0].unique().tolist() == pytest.approx([1 / (1 - p)])


def test_a_gradient_passes_where_the_input_passed() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    x = torch.ones(4, 16, requires_grad=True)
    out = drop(model, use_row_dropout(model), x)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_dropout_keeps_the_dtype() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    keys = use_row_dropout(model)
    assert drop(model, keys, torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_without_training_or_probability_dropout_is_the_identity() -> None:
    x = torch.randn(3, 5)
    model = nn.Sequential(nn.Dropout(0.9)).eval()
    use_row_dropout(model)
    model.eval()
    assert model(x) is x
    harmless = nn.Sequential(nn.Dropout(0.0)).train()
    use_row_dropout(harmless)
    assert harmless(x) is x


def encoder_layer() -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
    layer.self_attn.dropout = 0.0
    return layer


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 16)))
        self.encoder = encoder_layer()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.encoder(self.first(x)))
        return out


def dropouts(model: nn.Module) -> Iterator[RowDropout]:
    assert not any(isinstance(each, nn.Dropout) for each in model.modules())
    return (each for each in model.modules() if isinstance(each, RowDropout))


def test_every_dropout_of_an_encoder_layer_and_of_nested_modules_is_replaced_at_a_place_of_its_own() -> None:
    model = Nested()
    use_row_dropout(model)
    found = list(dropouts(model))
    assert len(found) == 5
    assert sorted(each.place for each in found) == [DROPOUT_PLACES + i for i in range(5)]
    assert {each.rate for each in found} == {0.3}


def test_a_dropout_module_used_under_several_names_is_replaced_under_each() -> None:
    shared = nn.Dropout(0.5)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    use_row_dropout(model)
    assert len(list(dropouts(model))) == 2


def test_a_network_gives_each_row_the_same_output_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    model = Nested()
    keys = use_row_dropout(model)
    x = torch.randn(6, 3, 16)
    whole = drop(model, keys, x)
    for position in range(6):
        alone = drop(model, keys, x[position : position + 1], torch.tensor([position]))
        torch.testing.assert_close(alone[0], whole[position], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(drop(model, keys, x, step=1), whole)


def test_torchs_own_generator_is_neither_read_nor_moved() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    keys = use_row_dropout(model)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drop(model, keys, torch.ones(4, 9))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(drop(model, keys, torch.ones(4, 9)), first)


class Attends(nn.Module):
    """As the attention modules of transformers: the probability is handed to a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.2


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.MultiheadAttention(8, 2, dropout=0.1), r"block\.inner \(MultiheadAttention\) drops out inside a kernel"),
        (nn.TransformerEncoderLayer(8, 2, dropout=0.1), r"block\.inner\.self_attn \(MultiheadAttention\).*p = 0\.1"),
        (Attends(), r"block\.inner \(Attends\).*p = 0\.2"),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.5), r"block\.inner \(LSTM\).*p = 0\.5"),
        (nn.Dropout2d(0.5), r"block\.inner is a Dropout2d; only nn\.Dropout"),
        (nn.AlphaDropout(0.5), r"block\.inner is a AlphaDropout; only nn\.Dropout"),
    ],
)
def test_dropout_that_cannot_be_drawn_by_row_is_refused_by_its_name(module: nn.Module, said: str) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"inner": module})})
    with pytest.raises(UserError, match=said):
        use_row_dropout(model)


@pytest.mark.parametrize("module", [nn.MultiheadAttention(8, 2), nn.LSTM(4, 4), nn.Dropout2d(0.0), nn.Identity()])
def test_the_same_modules_without_dropout_are_left_alone(module: nn.Module) -> None:
    model = nn.Sequential(module)
    use_row_dropout(model)
    assert model[0] is module


def test_an_input_whose_first_dimension_is_no_row_is_an_error_that_says_so() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    keys = use_row_dropout(model)
    with pytest.raises(RuntimeError, match=r"shape \(5, 3\) in a micro-batch of no rows"):
        model(torch.ones(5, 3))
    keys.current = row_keys(0, 0, torch.arange(3))
    with pytest.raises(RuntimeError, match=r"shape \(5, 3\) in a micro-batch of 3 rows.*first dimension"):
        model(torch.ones(5, 3))


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    place=st.integers(0, 2**31),
    shape=st.lists(st.integers(0, 5), max_size=3),
)
def test_a_uniform_draw_lies_in_zero_to_one_and_has_the_shape_asked_for(
    keys: list[int], place: int, shape: list[int]
) -> None:
    drawn = uniform(torch.tensor(keys), place, shape)
    assert drawn.shape == (len(keys), *shape)
    assert drawn.dtype == torch.float32
    assert bool(((drawn >= 0) & (drawn < 1)).all())


def test_draws_are_uniform() -> None:
    drawn = uniform(row_keys(5, 6, torch.arange(100)), 0, [10_000]).flatten().double()
    seen = torch.histc(drawn, bins=64, min=0, max=1)
    expected = drawn.numel() / 64
    assert float(((seen - expected) ** 2 / expected).sum()) < 63 + 5 * sqrt(2 * 63)
    assert float(drawn.mean()) == pytest.approx(0.5, abs=4 * sqrt(1 / 12 / drawn.numel()))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_streams_of_neighbouring_seeds_steps_rows_and_places_are_uncorrelated(lag: int) -> None:
    """Also when one is shifted against the other, which overlapping counters would show."""
    count, length = 4, 20_000
    rows = torch.arange(count)
    streams = [
        *uniform(row_keys(0, 0, rows), 0, [length]),
        *uniform(row_keys(0, 0, rows), 1, [length]),
        *uniform(row_keys(0, 1, rows), 0, [length]),
        *uniform(row_keys(1, 0, rows), 0, [length]),
    ]
    still = torch.stack([stream[: length - lag] for stream in streams])
    shifted = torch.stack([stream[lag:] for stream in streams])
    n = len(streams)
    correlation = torch.corrcoef(torch.cat([still, shifted]))[:n, n:]
    if lag == 0:
        correlation = correlation - torch.eye(n)
    assert float(correlation.abs().max()) < 5 / sqrt(length)


def test_no_two_rows_of_a_long_run_share_a_key() -> None:
    keys = torch.cat([row_keys(seed, step, torch.arange(500)) for seed in range(5) for step in range(100)])
    assert len(set(keys.tolist())) == len(keys)
