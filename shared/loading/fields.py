"""Fields of an untrusted JSON object, fetched by name and checked. Introduced in phase 1a.

Invariant: an error names the file, the field and the value; null counts as an absent field; two spellings of one
setting agree or are refused.
"""

import sys
from collections.abc import Mapping
from typing import Any

from shared.errors import ModelFolderError


class Fields:
    """The values of one JSON object; ``where`` names it in errors, ``defaults`` are the values of absent fields."""

    def __init__(self, values: dict[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.defaults = defaults
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return self.defaults.get(name, default) if value is None else value

    def wrong(self, name: str, wanted: str) -> ModelFolderError:
        return ModelFolderError(f"{self.where}: {name} is {self.values.get(name)!r}; it must be {wanted}.")

    def required(self, name: str, default: Any = None) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ModelFolderError(
                f"{self.where} has no field {name!r}, which this family needs; fetch the original config.json again."
            )
        return value

    def count(self, name: str, default: int | None = None, at_most: int = 1 << 22) -> int:
        value = self.required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            raise self.wrong(name, f"an integer from 1 to {at_most}")
        return value

    def number(self, name: str, default: float | None = None, can_be_zero: bool = False) -> float:
        value = self.required(name, default)
        # Compared, not converted: an integer may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.wrong(name, "a finite number")
        if value < 0 or (value == 0 and not can_be_zero):
            raise self.wrong(name, "at least 0" if can_be_zero else "greater than 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.required(name)
        if value not in allowed:
            raise self.wrong(name, "one of " + ", ".join(allowed))
        return value

    def json_object(self, name: str) -> dict[str, Any]:
        """A field that holds an object; an absent one is empty."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def agreed(self, spellings: dict[str, Any]) -> Any:
        """The single value of a setting that the file may spell in several ways; None if no spelling is present."""
        given = [(name, value) for name, value in spellings.items() if value is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                raise ModelFolderError(
                    f"{self.where}: {given[0][0]} is {given[0][1]!r} and {name} is {value!r}, two spellings of one "
                    "setting; leave out the one that is wrong."
                )
        return given[0][1] if given else None
