"""Every key of a run file, by section: type, unit, default, kind and one line of why.

A key's kind says what changing it means for a run that already exists: `maths` makes it another run, `speed` and
`place` are taken as they are.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from lwray.config.units import ByteCount, Count, Seconds, Stretch, parse_length

Kind = Literal["maths", "speed", "place"]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


def key(default: Any, kind: Kind, why: str, *, unit: str = "", **limits: Any) -> Any:
    """A configuration key: its default, what changing it means, why it exists, its unit."""
    return Field(default, description=why, json_schema_extra={"kind": kind, "unit": unit}, **limits)


class Section(BaseModel):
    """A table of the run file: frozen, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are no value for this key")
        return value


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a table as a run file spells them; only where Python reserves the word is the field another one."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


class RunSection(Section):
    name: str = key(
        "",
        "place",
        "the run's name; the configuration file's stem if empty",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$",
    )
    storage: str = key(
        "runs", "place", "where runs are kept: a directory that every worker sees, or s3://bucket/prefix"
    )
    seed: int = key(0, "maths", "seeds the initial weights, the order of the data and dropout", ge=0, lt=2**63)


class InitSection(Section):
    """Weights that exist already, for a new run to start from. A run with a checkpoint of its own reads none of it."""

    source: str = key(
        "",
        "maths",
        "weights to start from: RUN, RUN@STEP, RUN@best, a Hugging Face or torch.distributed.checkpoint directory, "
        "a .safetensors or .pt file",
        alias="from",
    )
    optimizer: bool = key(False, "maths", "also take the optimiser's moments and its step count; only from a run")


class TaskSection(Section):
    name: str = key("lm", "maths", "what is trained: a built-in task or path/to/file.py:Class")
    options: dict[str, Any] = key({}, "maths", "keys of a task of your own; the task checks them")


class ModelSection(Section):
    """The decoder that the `lm` task trains."""

    layers: int = key(4, "maths", "transformer blocks", ge=1)
    width: int = key(256, "maths", "residual stream", unit="features", ge=8)
    heads: int = key(4, "maths", "query heads; width / heads is the head dimension", ge=1)
    kv_heads: int = key(0, "maths", "key and value heads (grouped-query attention); 0 = heads", ge=0)
    ff_width: int = key(0, "maths", "hidden features of the feed-forward; 0 = 8/3 of the width, rounded up to 64", ge=0)
    context: Count = key(256, "maths", "tokens a row: each predicts the next", unit="tokens", ge=1)
    activation: Literal["swiglu", "relu2"] = key("swiglu", "maths", "feed-forward non-linearity")
    qk_norm: bool = key(False, "maths", "RMS-normalise queries and keys")
    tied: bool = key(True, "maths", "the output head shares the input embedding")
    dropout: float = key(0.0, "maths", "on the residual branches; drawn from (seed, step, row, place)", ge=0.0, lt=1.0)
    rope_theta: float = key(10000.0, "maths", "base of the rotary frequencies", gt=0.0)
    norm_eps: float = key(0.0, "maths", "added to the mean square in RMS norms; 0 = the dtype's epsilon", ge=0.0)


class DataSection(Section):
    source: list[str] = key(
        ["python:stdlib"],
        "maths",
        "files, directories, globs, hf://NAME, token shards, a prepared directory, or python:stdlib",
    )
    val_source: list[str] = key([], "maths", "held-out text; empty = a share of the source")
    val_share: float = key(
        0.02, "maths", "share of the source's pieces held out when val_source is empty", gt=0.0, le=0.5
    )
    format: Literal["auto", "text", "jsonl", "parquet", "hf", "tokens", "prepared"] = key(
        "auto", "maths", "how to read the source; auto goes by the name"
    )
    text_key: str = key("text", "maths", "the field or column that holds the text (JSONL, Parquet, hf://)")
    tokenizer: str = key(
        "bpe", "maths", "bpe = train a byte-level BPE on the source; bytes; a tokenizer.json; hf://NAME"
    )
    vocab_size: Count = key(512, "maths", "tokens of the trained BPE, or of given token shards", unit="tokens", ge=257)
    max_bytes: ByteCount = key(
        0, "maths", "read about this much of the source, evenly spread; 0 = all", unit="bytes", ge=0
    )
    log_ids: bool = key(False, "place", "record the rows of every step in sample_ids.jsonl")

    @field_validator("source", "val_source", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class BatchSection(Section):
    global_size: Count = key(0, "maths", "rows an optimiser step, over all workers", unit="rows", ge=0)
    global_tokens: Count = key(0, "maths", "instead of global_size: tokens a step", unit="tokens", ge=0)
    micro_size: int | Literal["auto"] = key("auto", "speed", "rows a forward pass on one worker", unit="rows")
    accumulation: int | Literal["auto"] = key(
        "auto", "speed", "micro-steps a step; given, micro x accumulation x workers must be the global size"
    )


class OptimSection(Section):
    name: Literal["adamw"] = key("adamw", "maths", "the optimiser")
    lr: float = key(1e-3, "maths", "peak learning rate", gt=0.0)
    betas: tuple[Share, Share] = key((0.9, 0.95), "maths", "decay of the first and second moments")
    eps: float = key(1e-8, "maths", "added to the root of the second moment", gt=0.0)
    weight_decay: float = key(0.1, "maths", "decoupled, on matrices only", ge=0.0)
    clip: float = key(1.0, "maths", "largest global gradient norm; 0 = no clipping", ge=0.0)
    schedule: Literal["cosine", "wsd", "linear", "onecycle", "constant"] = key(
        "cosine", "maths", "the shape of the learning rate over the run"
    )
    warmup_steps: Stretch = key("1%", "maths", "linear warm-up, in steps or as a share of the run", unit="steps or %")
    decay_steps: Stretch = key("20%", "maths", "wsd: length of the final decay", unit="steps or %")
    final_lr: float = key(0.1, "maths", "lr at the end as a share of the peak (cosine, wsd, linear)", ge=0.0, le=1.0)
    onecycle_div: float = key(25.0, "maths", "onecycle: peak over first lr", gt=0.0)
    onecycle_final_div: float = key(1e4, "maths", "onecycle: first over last lr", gt=0.0)

    @field_validator("warmup_steps", "decay_steps")
    @classmethod
    def _not_in_epochs(cls, value: object) -> object:
        if parse_length(value).unit == "ep":
            raise ValueError("give steps (100) or a share of the run (5%)")
        return value


class PrecisionSection(Section):
    mode: Literal["fp32", "bf16"] = key("fp32", "maths", "bf16 = autocast over fp32 master weights")


class ParallelSection(Section):
    backend: Literal["auto", "none", "ddp", "zero1", "zero2", "zero3"] = key(
        "auto", "speed", "how the state is shared; auto takes the plainest that fits"
    )
    workers: int | tuple[int, int] | Literal["auto"] = key(
        "auto", "speed", "a number, [min, max] or min-max; auto = one a GPU, on CPU one a node"
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "speed", "what a worker computes on")
    cpus_per_worker: float | Literal["auto"] = key(
        "auto", "speed", "CPU cores a worker; auto = a node's cores shared among its workers", unit="cores"
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _range(cls, value: object) -> object:
        if isinstance(value, str) and value != "auto":
            low, dash, high = value.partition("-")
            if not (low.isdigit() and (high.isdigit() or not dash)):
                raise ValueError(f"{value!r} is neither a number, a range such as 2-8, nor auto")
            return (int(low), int(high)) if dash else int(low)
        return value

    @field_validator("workers")
    @classmethod
    def _positive(cls, value: int | tuple[int, int] | str) -> int | tuple[int, int] | str:
        low, high = (value, value) if isinstance(value, int) else value if isinstance(value, tuple) else (1, 1)
        if not 1 <= low <= high:
            raise ValueError("at least one worker, and min no larger than max")
        return value


class CheckpointSection(Section):
    every_steps: Count = key(
        0,
        "place",
        "commit a checkpoint every so many steps; 0 = only by time and at the end",
        unit="steps",
        ge=0,
    )
    every_seconds: Seconds = key(
        "10min", "place", "commit one after so much time; 0 = never by time", unit="seconds", ge=0
    )
    every: Literal["given", "auto"] = key(
        "given",
        "place",
        "auto = by time, at the interval that a save's measured cost and the losses so far ask for: 2 % at most",
    )
    asynchronous: bool = key(True, "place", "training stands still for a copy only, and files are written beside it")
    deadline: Seconds = key(
        "10min",
        "place",
        "give up a save that takes longer; the next is waited for",
        unit="seconds",
        gt=0,
    )
    keep: int = key(3, "place", "newest committed checkpoints to keep", ge=1)
    keep_best: int = key(0, "place", "beside them, those of lowest validation loss; saves at each new best", ge=0)
    exportable: bool = key(False, "place", "refuse at the start a model that lwray export cannot write")


class EvalSection(Section):
    every_steps: Count = key(0, "maths", "evaluate every so many steps; 0 = only at the end", unit="steps", ge=0)
    rows: Count = key(0, "maths", "held-out rows, the same each time; 0 = all", unit="rows", ge=0)
    stop_below: float | None = key(None, "maths", "finish when the validation loss is below this", unit="nats")
    patience: int = key(0, "maths", "finish after so many evaluations without improvement; 0 = never", ge=0)
    min_delta: float = key(0.0, "maths", "what counts as an improvement", unit="nats", ge=0.0)
    baseline: bool = key(True, "place", "lm: compare with a Witten-Bell bigram model (up to 50 M training tokens)")


class TrainSection(Section):
    steps: Stretch = key(1000, "maths", "optimiser steps, or epochs (2ep)", unit="steps or ep")
    max_hours: float = key(
        0.0,
        "place",
        "finish after so many hours of steps over all attempts; 0 = no limit",
        unit="hours",
        ge=0.0,
    )
    deterministic: bool = key(
        False,
        "speed",
        "the same bits each time on one layout, on a GPU too, at some cost; on a CPU they are anyway",
    )
    log_every: int = key(1, "place", "steps between logged metrics", unit="steps", ge=1)

    @field_validator("steps")
    @classmethod
    def _not_a_share(cls, value: object) -> object:
        if parse_length(value).unit == "share" or parse_length(value).amount <= 0:
            raise ValueError("give steps (1000) or epochs (2ep), more than none")
        return value


class TrackingSection(Section):
    enabled: bool = key(True, "place", "record the run in MLflow")
    uri: str = key("", "place", "MLflow tracking URI; empty = MLFLOW_TRACKING_URI, or a database in the storage")
    experiment: str = key("lwray", "place", "MLflow experiment")


class ClusterSection(Section):
    max_failures: int = key(3, "place", "restarts after lost workers, with no commit between, before giving up", ge=0)
    time_limit: Seconds = key(
        0, "place", "end so long after the start, to be started again; 0 = as the Slurm job", unit="seconds", ge=0
    )
    idle_leave: Seconds = key(
        "10min", "place", "Slurm fleet: a node on which nothing ran for so long leaves", unit="seconds", gt=0
    )
    max_restarts: int = key(
        8, "place", "restarts of a driver that died, before giving up; one is given back each hour", ge=0
    )
    lease_s: Seconds = key(
        "30s", "place", "take a run over from another process that gave no sign for so long", unit="seconds", gt=0
    )
    grows: bool = key(
        False, "place", "machines may join after the start: wait for the fewest workers' instead of refusing them"
    )
    wait_s: Seconds = key("10s", "place", "wait so long for more than the fewest workers", unit="seconds", ge=0)
    hang_s: Seconds = key(
        "60s",
        "place",
        "restart workers that were silent for so long, or for 10 median steps, and sixty times that at their start; "
        "0 = never",
        unit="seconds",
        ge=0,
    )
    give_up_after: Seconds = key(
        "24h", "place", "end when there was no room for the fewest workers for so long; 0 = never", unit="seconds", ge=0
    )


class Config(Section):
    """A whole run, resolved and frozen."""

    run: RunSection = Field(default_factory=RunSection)
    init: InitSection = Field(default_factory=InitSection)
    task: TaskSection = Field(default_factory=TaskSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    train: TrainSection = Field(default_factory=TrainSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    env: dict[str, str] = key({}, "place", "environment variables set in every worker before it starts")
