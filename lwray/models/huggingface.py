"""Between our decoder and the classes of transformers that compute the same: sizes, names and tables, both ways."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwray.errors import UserError
from lwray.models.stored import read_json, read_tensor, stored_tensors
from lwray.models.transformer import Shape, Transformer

CLASSES = {
    ("swiglu", False): "LlamaForCausalLM",
    ("swiglu", True): "Qwen3ForCausalLM",
    ("relu2", False): "ArceeForCausalLM",
}
"""By activation and qk_norm. All of them rotate the halves of a head, as ours does."""

NORM_EPS = torch.finfo(torch.float32).eps
"""What nn.RMSNorm adds to the mean square where it is given nothing."""

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_A_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ff_norm": "post_attention_layernorm",
    "ff.gate": "mlp.gate_proj",
    "ff.up": "mlp.up_proj",
    "ff.down": "mlp.down_proj",
}
TABLES = ("embedding.weight", "head.weight")
"""Their rows are tokens; ours are padded."""

SIZES = {
    "model.layers": "num_hidden_layers",
    "model.width": "hidden_size",
    "model.heads": "num_attention_heads",
    "model.kv_heads": "num_key_value_heads",
    "model.width / model.heads": "head_dim",
    "model.ff_width": "intermediate_size",
    "model.activation": "hidden_act",
    "model.rope_theta": "rope_theta",
    "model.norm_eps": "rms_norm_eps",
}
"""Our key and theirs, of what must be equal."""
OURS_HAVE_NONE = ("attention_bias", "mlp_bias", "sliding_window")


def class_for(shape: Shape) -> str:
    """The name of the transformers class that computes what a decoder of this shape does.

    Raises UserError, naming the keys, where there is none.
    """
    name = CLASSES.get((shape.activation, shape.qk_norm))
    if name is None:
        raise UserError(
            f"No class of transformers has model.activation = {shape.activation!r} together with model.qk_norm = "
            f"{str(shape.qk_norm).lower()}: such a model cannot be exported. Change one of the two keys."
        )
    return name


def to_huggingface(shape: Shape, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """A transformers configuration for `class_for(shape)`, and the weights under its names, their dtype kept.

    The tables are cut to the `vocab` rows that are tokens; a tied head has no tensor. Raises UserError where no
    class fits or the installed transformers lacks it.
    """
    config = _config(shape)
    config.dtype = tensors["embedding.weight"].dtype
    named = {theirs: tensors[ours] for ours, theirs in _names(shape)}
    for name in TABLES:
        if name in tensors:
            named[OUTSIDE[name]] = tensors[name][: shape.vocab].clone()
    return config, named


def write(config: Any, tensors: dict[str, Tensor], directory: Path) -> None:
    """config.json and safetensors, in shards with an index where they are large: what `from_pretrained` reads."""
    from huggingface_hub import save_torch_state_dict

    config.save_pretrained(directory)
    save_torch_state_dict(tensors, directory, metadata={"format": "pt"})


def from_huggingface(directory: Path, shape: Shape) -> dict[str, Tensor]:
    """The weights of a Llama, Qwen3 or Arcee directory under our names, in the dtype that they are stored in.

    Tables of more rows than `padded_vocab` are cut, shorter ones padded; an untied head may begin as the tied one
    of the directory. Raises UserError where `shape` is not the directory's, naming the differing keys, and where
    the weights are not safetensors or not all there.
    """
    theirs = _read_config(directory, shape)
    stored = stored_tensors(directory)
    _refuse_foreign(directory, shape, stored)
    with torch.device("meta"):
        sizes = {name: p.shape for name, p in Transformer(shape).named_parameters()}
    found = {}
    for ours, name in _names(shape):
        if ours not in TABLES:
            found[ours] = read_tensor(stored, name, sizes[ours])
            continue
        source = OUTSIDE["embedding.weight"] if theirs.tie_word_embeddings else name
        found[ours] = _padded(read_tensor(stored, source, (theirs.vocab_size, shape.width)), shape)
    return found


def _config(shape: Shape) -> Any:
    import transformers

    name = class_for(shape)
    # not the class itself, whose import takes seconds
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"), None)
    if config_class is None:
        raise UserError(f"The installed transformers {transformers.__version__} has no {name}; install a newer one.")
    return config_class(
        architectures=[name],
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ff_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_act="silu" if shape.activation == "swiglu" else shape.activation,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps or NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        # their defaults are ids of other vocabularies
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _names(shape: Shape) -> Iterator[tuple[str, str]]:
    """(our name, theirs) of every parameter of a decoder of this shape."""
    lacking = set() if shape.qk_norm else {"attention.query_norm", "attention.key_norm"}
    lacking |= set() if shape.activation == "swiglu" else {"ff.gate"}
    for ours, theirs in OUTSIDE.items():
        if not (ours == "head.weight" and shape.tied):
            yield ours, theirs
    for layer in range(shape.layers):
        for ours, theirs in IN_A_BLOCK.items():
            if ours not in lacking:
                yield f"blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight"


def _read_config(directory: Path, shape: Shape) -> Any:
    """The directory's configuration, once it is known to be that of `shape`."""
    ours = _config(shape)
    raw = read_json(directory / "config.json")
    if raw.get("model_type") != ours.model_type:
        raise UserError(
            f"{directory} is of type {raw.get('model_type')!r}; model.activation = {shape.activation!r} with "
            f"model.qk_norm = {str(shape.qk_norm).lower()} is {ours.model_type!r} ({class_for(shape)})."
        )
    theirs = type(ours).from_pretrained(directory)
    differing = [
        f"{key} = {_value(ours, name)} here, {name} = {_value(theirs, name)} there"
        for key, name in SIZES.items()
        if _value(ours, name) != _value(theirs, name)
    ]
    if theirs.vocab_size < shape.vocab:
        differing.append(f"the data has {shape.vocab} tokens, vocab_size = {theirs.vocab_size} there")
    if shape.tied and not theirs.tie_word_embeddings:
        differing.append("model.tied = true here, tie_word_embeddings = false there")
    extras = [name for name in OURS_HAVE_NONE if getattr(theirs, name, None)]
    if theirs.rope_parameters["rope_type"] != "default":
        extras.append(f"rope_type {theirs.rope_parameters['rope_type']!r}")
    differing += [f"{name} there, for which there is no key here" for name in extras]
    if differing:
        raise UserError(f"{directory} holds a model of another shape: {'; '.join(differing)}.")
    return theirs


def _value(config: Any, name: str) -> Any:
    return config.rope_parameters["rope_theta"] if name == "rope_theta" else getattr(config, name)


def _refuse_foreign(directory: Path, shape: Shape, stored: Mapping[str, Path]) -> None:
    """A tensor that has no place here (a bias, a scale of a quantised matrix) must not be left out in silence."""
    known = {name for _, name in _names(shape)} | {OUTSIDE["head.weight"]}
    # early Llama directories hold the rotary frequencies, which follow from rope_theta
    foreign = sorted(name for name in stored if name not in known and not name.endswith("rotary_emb.inv_freq"))
    if foreign:
        raise UserError(f"{directory} holds {foreign[0]}, for which this decoder has no place.")


def _padded(table: Tensor, shape: Shape) -> Tensor:
    """`table` with `padded_vocab` rows.

    The rows that no token has are the mean of the others: as logits of a head, by Jensen's inequality, they then take
    at most (rows added / rows) of the others' probability, whereas the logit 0 of an empty row may be the largest.
    """
    table = table[: shape.padded_vocab]
    rows = shape.padded_vocab - len(table)
    mean = table.float().mean(dim=0, keepdim=True).to(table.dtype)
    return torch.cat((table, mean.expand(rows, -1))) if rows else table
