"""The configuration for people and editors: every key, its JSON schema, a run's values and their origins."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from lwray.config.load import Resolved, dotted, kind_of
from lwray.config.schema import Config, keys_of
from lwray.config.units import parse_bytes, parse_count, parse_length, parse_seconds

QUANTITIES = {
    parse_bytes: "size such as 72GB",
    parse_count: "count such as 1.5M",
    parse_length: "length",
    parse_seconds: "time such as 30min",
}
WORDS: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
}


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key as people read it."""

    key: str
    type: str
    unit: str
    """Empty for a key without one."""
    default: str
    kind: str
    why: str


def keys() -> list[KeyRow]:
    """Every key, in the order of the schema."""
    return [_row(key, field) for key, field in _fields(Config)]


def keys_table() -> str:
    """Every key on a line of its own: `key = default`, type and unit, kind, why."""
    rows = [(f"{row.key} = {row.default}", _type_and_unit(row), row.kind, row.why) for row in keys()]
    return _aligned(rows, widest=(36, 40, 6))


def values_table(resolved: Resolved) -> str:
    """Every value of a run on a line of its own: `key = value`, kind, origin."""
    rows = []
    for key, value in dotted(resolved.config):
        if key == "env":
            continue
        rows.append((f"{key} = {_written(value)}", kind_of(key), resolved.origins.get(key, "default")))
    for name, text in resolved.config.env.items():
        key = f"env.{name}"
        rows.append((f"{key} = {_written(text)}", "place", resolved.origins[key]))
    return _aligned(rows, widest=(60, 6))


def json_schema() -> dict[str, Any]:
    """The run file's JSON schema, for editors; each key has its `kind` and `unit`."""
    schema = Config.model_json_schema()
    # what validators take beyond the types that pydantic sees
    _also(schema, "ParallelSection", "workers", {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"})
    for name in ("source", "val_source"):
        _also(schema, "DataSection", name, {"type": "string"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "lwray run file"}


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in keys_of(model).items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _fields(annotation, f"{name}.")
        else:
            yield prefix + name, field


def _row(key: str, field: FieldInfo) -> KeyRow:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return KeyRow(
        key=key,
        type=_quantity(field) or _words(field.annotation),
        unit=str(extra["unit"]),
        default=_written(field.default),
        kind=str(extra["kind"]),
        why=field.description or "",
    )


def _quantity(field: FieldInfo) -> str | None:
    for mark in field.metadata:
        if isinstance(mark, BeforeValidator):
            return next((words for parse, words in QUANTITIES.items() if parse is mark.func), None)
    return None


def _words(annotation: Any) -> str:
    """`int | Literal["auto"]` as `integer | auto`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inner[0])
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " | ".join(_words(form) for form in inner if form is not NoneType)
    if origin is list:
        return f"list of {_words(inner[0])}"
    if origin is tuple:
        return "[" + ", ".join(map(_words, inner)) + "]"
    return "table" if origin is dict else WORDS[annotation]


def _written(value: Any) -> str:
    """A value as TOML has it, shortly: quantities without quotes, nothing for a key that is not set."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_written(item)}" for name, item in value.items()) + "}"
    return "(not set)" if value is None else str(value)


def _type_and_unit(row: KeyRow) -> str:
    return f"{row.type}, {row.unit}" if row.unit else row.type


def _aligned(rows: Sequence[tuple[str, ...]], widest: tuple[int, ...]) -> str:
    """Columns of even width; a cell longer than `widest` moves only its own line."""
    widths = [min(most, max(len(row[i]) for row in rows)) for i, most in enumerate(widest)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


def _also(schema: dict[str, Any], section: str, name: str, accepted: dict[str, str]) -> None:
    key = schema["$defs"][section]["properties"][name]
    forms = key.pop("anyOf", None) or [{part: key.pop(part) for part in ("type", "items")}]
    key["anyOf"] = [*forms, accepted]
