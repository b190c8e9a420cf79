"""Our decoder and the classes of transformers: the same logits, weights there and back, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lwray.errors import UserError
from lwray.models.huggingface import (
    CLASSES,
    TABLES,
    class_for,
    from_huggingface,
    to_huggingface,
    write,
)
from lwray.models.transformer import Shape, Transformer

SHAPE = Shape(vocab=257, layers=2, width=32, heads=4, kv_heads=2, ff_width=48, context=24, rope_theta=5e4)
SETS = {
    "llama": SHAPE,
    "llama, untied, a head each": replace(SHAPE, tied=False, kv_heads=4),
    "qwen3": replace(SHAPE, qk_norm=True),
    "qwen3, untied": replace(SHAPE, qk_norm=True, tied=False, kv_heads=1),
    "arcee": replace(SHAPE, activation="relu2"),
    "arcee, untied": replace(SHAPE, activation="relu2", tied=False),
}


def network(shape: Shape, dtype: torch.dtype = torch.float32) -> Transformer:
    """With weights so large, and norms so uneven, that a wrong place for any of them shows in the logits."""
    model = Transformer(shape).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else 1 + noise * 0.3)
    return model.to(dtype)


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def written(shape: Shape, directory: Path, model: Transformer | None = None) -> Path:
    """A directory in Hugging Face's layout."""
    directory.mkdir(exist_ok=True)
    write(*to_huggingface(shape, weights(model or network(shape))), directory)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits(model: torch.nn.Module, vocab: int) -> Tensor:
    tokens = torch.randint(0, vocab, (3, SHAPE.context), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(tokens)
    found: Tensor = (out if isinstance(out, Tensor) else out.logits)[..., :vocab]
    return found


@pytest.mark.parametrize("shape", SETS.values(), ids=SETS)
def test_the_class_of_transformers_computes_the_same_logits(shape: Shape, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = network(shape)
    loaded, report = AutoModelForCausalLM.from_pretrained(written(shape, tmp_path, model), output_loading_info=True)
    assert type(loaded).__name__ == class_for(shape)
    assert not any(report.values())
    ours = logits(model, shape.vocab)
    assert ours.abs().max() > 1
    torch.testing.assert_close(logits(loaded, shape.vocab), ours, rtol=0, atol=1e-5)


def test_each_class_is_reached_by_some_set() -> None:
    assert {class_for(shape) for shape in SETS.values()} == set(CLASSES.values())


shapes = st.builds(
    Shape,
    vocab=st.sampled_from([1, 100, 128, 129]),
    layers=st.integers(1, 2),
    width=st.sampled_from([16, 32]),
    heads=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    ff_width=st.sampled_from([8, 24]),
    context=st.just(8),
    activation=st.just("swiglu"),
    qk_norm=st.booleans(),
    tied=st.booleans(),
    rope_theta=st.sampled_from([1e4, 1e6]),
) | st.builds(replace, st.just(SHAPE), activation=st.just("relu2"), tied=st.booleans())


@given(shape=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_weights_come_back_as_they_went(
    shape: Shape, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sent = weights(network(shape, dtype))
    directory = tmp_path_factory.mktemp("hf")
    write(*to_huggingface(shape, sent), directory)
    back = from_huggingface(directory, shape)
    shutil.rmtree(directory)
    assert back.keys() == sent.keys()
    for name, tensor in sent.items():
        rows = shape.vocab if name in TABLES else None
        assert back[name].shape == tensor.shape
        assert back[name].dtype == dtype
        assert torch.equal(back[name][:rows], tensor[:rows])


def test_ids_that_no_token_has_never_take_more_than_their_share(tmp_path: Path) -> None:
    shape, token = SETS["llama, untied, a head each"], torch.zeros(1, 1, dtype=torch.long)
    model, back = network(shape), network(shape)
    assert model.head is not None
    with torch.no_grad():
        # every logit far below 0, which is that of an empty row
        model.head.weight.sub_(model.hidden(token)[0, 0])
        back.load_state_dict(from_huggingface(written(shape, tmp_path, model), shape))
        assert model(token).max() < -5
        probability = back(token)[0, 0].softmax(0)
    assert probability[shape.vocab :].sum() <= (shape.padded_vocab - shape.vocab) / shape.padded_vocab


def test_a_directory_that_transformers_wrote_loads_here(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = replace(SETS["qwen3, untied"], vocab=256, norm_eps=1e-5)
    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": 5e4},
            rms_norm_eps=1e-5,
            initializer_range=0.3,
        )
    )
    theirs.save_pretrained(tmp_path)
    model = Transformer(shape).eval()
    # 300 rows there, 256 here, a multiple of 128: cut
    model.load_state_dict(from_huggingface(tmp_path, shape))
    torch.testing.assert_close(logits(model, 256), logits(theirs.eval(), 256), rtol=0, atol=1e-5)


def test_shards_with_an_index_are_read(tmp_path: Path) -> None:
    config, tensors = to_huggingface(SHAPE, weights(network(SHAPE)))
    config.save_pretrained(tmp_path)
    save_torch_state_dict(tensors, tmp_path, max_shard_size="16KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    back = from_huggingface(tmp_path, SHAPE)
    assert all(torch.equal(back[name][:257], tensor[:257]) for name, tensor in weights(network(SHAPE)).items())


def test_a_configuration_of_transformers_4_is_read(tmp_path: Path) -> None:
    directory = written(SHAPE, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    del config["dtype"]
    older = {**config, "rope_theta": theta, "rope_scaling": None, "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(older))
    assert from_huggingface(directory, SHAPE).keys() == weights(network(SHAPE)).keys()
    with pytest.raises(UserError, match=r"model.rope_theta = 10000.0 here, rope_theta = 50000.0 there"):
        from_huggingface(directory, replace(SHAPE, rope_theta=1e4))


def test_an_untied_head_may_begin_as_the_tied_one(tmp_path: Path) -> None:
    found = from_huggingface(written(SHAPE, tmp_path), replace(SHAPE, tied=False))
    assert torch.equal(found["head.weight"], found["embedding.weight"])


def test_no_class_has_squared_relu_and_normed_queries() -> None:
    with pytest.raises(UserError, match=r"model.activation = 'relu2' together with model.qk_norm = true"):
        class_for(replace(SHAPE, activation="relu2", qk_norm=True))


def test_a_transformers_without_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "ArceeConfig", None)
    with pytest.raises(UserError, match=r"transformers .* has no ArceeForCausalLM; install a newer one"):
        to_huggingface(SETS["arcee"], weights(network(SETS["arcee"])))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": 3, "ff_width": 64}, r"model.layers = 3 here.* = 2 there; model.ff_width = 64 here.* = 48 there"),
        ({"heads": 2}, r"model.heads = 2 here.*model.width / model.heads = 16 here, head_dim = 8 there"),
        ({"kv_heads": 4}, r"model.kv_heads = 4 here, num_key_value_heads = 2 there"),
        ({"vocab": 258}, r"the data has 258 tokens, vocab_size = 257 there"),
        ({"qk_norm": True}, r"is of type 'llama'; .*model.qk_norm = true is 'qwen3' \(Qwen3ForCausalLM\)"),
        ({"activation": "relu2"}, r"is of type 'llama'; model.activation = 'relu2'.* is 'arcee'"),
    ],
)
def test_another_shape_is_refused_by_its_keys(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        from_huggingface(written(SHAPE, tmp_path), replace(SHAPE, **changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tie_word_embeddings": False}, r"model.tied = true here, tie_word_embeddings = false there"),
        ({"attention_bias": True, "mlp_bias": True}, r"attention_bias there, .*; mlp_bias there"),
        ({"hidden_act": "gelu"}, r"model.activation = silu here, hidden_act = gelu there"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}},
            r"rope_type 'linear' there, for which there is no key here",
        ),
    ],
)
def test_what_there_is_no_key_for_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    change_config(written(SHAPE, tmp_path), **changes)
    with pytest.raises(UserError, match=sentence):
        from_huggingface(tmp_path, SHAPE)


def test_the_epsilon_of_the_norms_goes_both_ways_and_must_be_the_same(tmp_path: Path) -> None:
    shape = replace(SHAPE, norm_eps=1e-5)
    directory = written(shape, tmp_path)
    assert json.loads((directory / "config.json").read_text())["rms_norm_eps"] == 1e-5
    from_huggingface(directory, shape)
    with pytest.raises(UserError, match=r"model.norm_eps = 1.19\S+e-07 here, rms_norm_eps = 1e-05 there"):
        from_huggingface(directory, SHAPE)


def test_a_missing_a_foreign_and_a_misshapen_tensor_are_refused_by_name(tmp_path: Path) -> None:
    stored = load_file(written(SHAPE, tmp_path) / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, sentence in (
        ({key: tensor for key, tensor in stored.items() if key != name}, f"lacks the tensor {name}"),
        (stored | {f"{name}_scale": torch.ones(1)}, f"holds {name}_scale, for which this decoder has no place"),
        (stored | {name: torch.ones(3, 3)}, rf"{name} has shape \(3, 3\), by config.json it is \(48, 32\)"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=sentence):
            from_huggingface(tmp_path, SHAPE)


def test_pickles_torn_files_and_other_directories_are_refused(tmp_path: Path) -> None:
    directory = written(SHAPE, tmp_path / "hf")
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read as safetensors"):
        from_huggingface(directory, SHAPE)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        from_huggingface(directory, SHAPE)
    torch.save({}, directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickles \(.bin\) only, and to read a pickle may run any code"):
        from_huggingface(directory, SHAPE)
    (directory / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not JSON"):
        from_huggingface(directory, SHAPE)
    with pytest.raises(UserError, match=r"is no model in Hugging Face's layout: it has no config.json"):
        from_huggingface(tmp_path, SHAPE)
