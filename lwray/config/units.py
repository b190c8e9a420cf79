"""Quantities as people write them: `30min`, `2ep`, `72GB`, `5%`."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}

_QUANTITY = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z%]*)\s*")


def _split(text: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    # binary floats would make 0.067B a fraction
    return Decimal(match[1]), match[2]


def _scaled(value: object, scale: dict[str, float] | dict[str, int], example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number or a text such as {example!r}")
    number, unit = _split(value) if isinstance(value, str) else (Decimal(value), "")
    if unit not in scale:
        known = ", ".join(name for name in scale if name)
        raise ValueError(f"unknown unit {unit!r} in {value!r}; known units: {known} (such as {example!r})")
    scaled = float(number * Decimal(str(scale[unit])))
    if not math.isfinite(scaled):
        raise ValueError(f"{value!r} is not a finite number")
    return scaled


def parse_seconds(value: object) -> float:
    """Seconds from `90`, `"30min"` or `"1.5h"`. Raises ValueError on an unknown unit."""
    return _scaled(value, {**SECONDS, "": 1.0}, "30min")


def parse_bytes(value: object) -> int:
    """Bytes from `1024`, `"72GB"` (10⁹) or `"72GiB"` (2³⁰). Raises ValueError on an unknown unit."""
    return int(_scaled(value, {**BYTES, "": 1}, "72GB"))


def parse_count(value: object) -> int:
    """A whole number from `131072`, `"131072"` or `"1.5M"` (10⁶). Raises ValueError on a fraction."""
    count = _scaled(value, COUNTS, "1.5M")
    if count != int(count):
        raise ValueError(f"{value!r} is not a whole number")
    return int(count)


@dataclass(frozen=True, slots=True)
class Length:
    """A stretch of training: optimiser steps, epochs, or a share of the whole run."""

    amount: float
    unit: str
    """`steps`, `ep` (epochs) or `share` (0 to 1)."""

    def __str__(self) -> str:
        if self.unit == "share":
            return f"{_shortest(Decimal(repr(self.amount)) * 100)}%"
        return f"{_shortest(Decimal(repr(self.amount)))}ep" if self.unit == "ep" else f"{int(self.amount)}"

    def steps(self, *, total_steps: int = 0, rows: int = 0, batch_rows: int = 1) -> int:
        """Optimiser steps; `rows` an epoch and `batch_rows` a step serve epochs, `total_steps` shares."""
        if self.unit == "steps":
            return int(self.amount)
        if self.unit == "ep":
            return math.ceil(Fraction(str(self.amount)) * rows / batch_rows)
        return round(self.amount * total_steps)


def _shortest(number: Decimal) -> str:
    return format(number.normalize(), "f")


def parse_length(value: object) -> Length:
    """Steps from `1000` or `"10K"`, epochs from `"2ep"`, a share from `"5%"` or a float below 1.

    Raises ValueError on an unknown unit, a fraction of a step, less than nothing, or more than the whole run.
    """
    length = value if isinstance(value, Length) else _length(value)
    if length.amount < 0 or (length.unit == "share" and length.amount > 1):
        raise ValueError(f"{value!r} is less than nothing or more than the whole run")
    return length


def _length(value: object) -> Length:
    if isinstance(value, float) and 0.0 < value < 1.0:
        return Length(value, "share")
    if isinstance(value, str):
        number, unit = _split(value)
        if unit == "ep":
            return Length(float(number), "ep")
        if unit == "%":
            return Length(float(number / 100), "share")
        if unit in ("step", "steps"):
            return Length(float(parse_count(str(number))), "steps")
        if unit not in COUNTS:
            raise ValueError(f"unknown unit {unit!r} in {value!r}; write steps (1000), epochs (2ep) or a share (5%)")
    return Length(float(parse_count(value)), "steps")


def _plain(type_name: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": type_name}, {"type": "string"}]})


Seconds = Annotated[float, BeforeValidator(parse_seconds), _plain("number")]
ByteCount = Annotated[int, BeforeValidator(parse_bytes), _plain("integer")]
Count = Annotated[int, BeforeValidator(parse_count), _plain("integer")]
Stretch = Annotated[Length, BeforeValidator(parse_length), PlainSerializer(str, return_type=str), _plain("integer")]
