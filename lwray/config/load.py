"""A run file, a site file and command-line overrides become one frozen Config, each value with its origin."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lwray.config.schema import Config, DataSection, keys_of
from lwray.errors import UserError


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Config and where each of its values came from (`default`, a file's name, or `command line`)."""

    config: Config
    origins: Mapping[str, str]
    path: Path


def load(path: Path, overrides: Sequence[str] = (), site: Path | None = None) -> Resolved:
    """Read `path`, lay `site` and then `overrides` (`section.key=value`) over it.

    Raises UserError for a missing or malformed file, an unknown key (naming the nearest), a wrong type or
    unit.
    """
    layers = [(str(path), _read_toml(path))]
    if site is not None:
        layers.append((str(site), _only_place_and_speed(site, _read_toml(site))))
    layers.append(("command line", _parse_overrides(overrides)))

    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, table in layers:
        _check_known(table, origin)
        for section, keys in table.items():
            for name, value in keys.items():
                table_so_far = merged.setdefault(section, {})
                table_so_far[name] = _laid_over(table_so_far.get(name), value)
                origins[f"{section}.{name}"] = origin
    run = merged.setdefault("run", {})
    if run.setdefault("name", "") == "":
        run["name"] = path.stem
        origins["run.name"] = "the file's name"
    return Resolved(_validate(merged, origins), origins, path)


def load_data(sources: Sequence[str], overrides: Sequence[str]) -> DataSection:
    """The `[data]` section of `lwray prepare`: its sources, and `data.key=value` over the defaults."""
    table = _parse_overrides(overrides)
    _check_known(table, "command line")
    return _validate({"data": {**table.get("data", {}), "source": list(sources)}}, {}).data


def dotted(config: BaseModel) -> Iterator[tuple[str, Any]]:
    """(`section.key`, value) of every key, in the order of the schema; `env` is one key."""
    for section, value in config:
        if isinstance(value, BaseModel):
            for name, (_, inner) in zip(keys_of(type(value)), value, strict=True):
                yield f"{section}.{name}", inner
        else:
            yield section, value


def kind_of(dotted_key: str) -> str:
    """`maths`, `speed` or `place`."""
    section, _, name = dotted_key.partition(".")
    field = Config.model_fields[section]
    if name:
        field = keys_of(_section_class(section))[name]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["kind"])


def _section_class(section: str) -> type[BaseModel]:
    annotation = Config.model_fields[section].annotation
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None


def _only_place_and_speed(site: Path, table: dict[str, Any]) -> dict[str, Any]:
    _check_known(table, str(site))
    maths = [
        f"{section}.{name}"
        for section, keys in table.items()
        if section != "env"
        for name in keys
        if kind_of(f"{section}.{name}") == "maths"
    ]
    if maths:
        raise UserError(
            f"{site} is laid over a run to say where and how fast; {', '.join(maths)} would change its mathematics."
        )
    return table


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for text in overrides:
        dotted_key, equals, value = text.partition("=")
        section, dot, name = dotted_key.strip().partition(".")
        if not (equals and dot and section and name):
            raise UserError(f"{text!r} is not section.key=value, such as optim.lr=3e-4.")
        # `task.options.depth=2` reaches one level deeper; every other key is section.key
        option, _, rest = name.partition(".")
        parsed = _parse_value(value, text_only=_holds_text(section, name))
        if rest and (section, option) == ("task", "options"):
            table.setdefault(section, {}).setdefault(option, {})[rest] = parsed
        else:
            table.setdefault(section, {})[name] = parsed
    return table


def _laid_over(below: object, above: object) -> object:
    """`task.options` of two layers are joined; every other value replaces the one below."""
    return {**below, **above} if isinstance(below, dict) and isinstance(above, dict) else above


def _holds_text(section: str, name: str) -> bool:
    if section not in Config.model_fields or section == "env":
        return section == "env"
    field = keys_of(_section_class(section)).get(name)
    return field is not None and field.annotation in (str, list[str])


def _parse_value(text: str, *, text_only: bool) -> Any:
    """A TOML value, or the text itself where it is none or stands for text (a shell takes quotes away)."""
    try:
        parsed = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return parsed if isinstance(parsed, str | list) or not text_only else text


def _check_known(table: Mapping[str, Any], origin: str) -> None:
    sections = list(Config.model_fields)
    for section, keys in table.items():
        if section not in sections and not isinstance(keys, Mapping):
            raise UserError(
                f"{origin}: {section} stands in no section; `lwray config --keys` lists all keys by section."
            )
        if section not in sections:
            raise UserError(f"{origin}: unknown section [{section}]{_did_you_mean(_close(section, sections))}")
        if not isinstance(keys, Mapping):
            raise UserError(f"{origin}: [{section}] is a section; write {section}.KEY = … or a table.")
        if section == "env":
            continue
        for name in keys:
            if name not in keys_of(_section_class(section)):
                hint = _did_you_mean(_nearest_key(section, name))
                raise UserError(f"{origin}: unknown key {section}.{name}{hint} `lwray config --keys` lists all keys.")


def _nearest_key(section: str, name: str) -> str:
    """The same name in another section, else a like name in this section, else a like name anywhere."""
    by_name = {key.partition(".")[2]: key for key, _ in dotted(Config()) if "." in key}
    here = {own: f"{section}.{own}" for own in keys_of(_section_class(section))}
    near = by_name.get(name) or here.get(_close(name, list(here)))
    return near or by_name.get(_close(name, list(by_name)), "")


def _close(name: str, known: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def _did_you_mean(nearest: str) -> str:
    return f"; did you mean {nearest}?" if nearest else "."


def _validate(merged: dict[str, Any], origins: Mapping[str, str]) -> Config:
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            place = [str(part) for part in problem["loc"]]
            name = ".".join(place[:2])
            lines.append(f"{origins.get(name, 'default')}: {name}: {_worded(problem)}{_hint(name)}")
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def _worded(problem: Mapping[str, Any]) -> str:
    """What pydantic says, but for the one key with a pattern, which is a name: what a name may hold."""
    if problem["type"] == "string_pattern_mismatch":
        return "not the pattern of a name; use letters, digits, '.', '_' and '-' only, the first a letter or a digit"
    return str(problem["msg"]).removeprefix("Value error, ")


def _hint(name: str) -> str:
    section, _, field = name.partition(".")
    if section not in Config.model_fields or section == "env" or field not in keys_of(_section_class(section)):
        return ""
    info = keys_of(_section_class(section))[field]
    extra = info.json_schema_extra
    unit = f", in {extra['unit']}" if isinstance(extra, dict) and extra.get("unit") else ""
    return f" ({info.description}{unit})"
