"""The kinds of option texts: whole numbers, sizes, times, choices, JSON.

Always true: `parse` returns a value, or raises an error with the option's name, the user's text and
the allowed values; `parse` never rounds, guesses or cuts.
"""

import datetime
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol
from zoneinfo import ZoneInfo

from spark_ledger import units
from spark_ledger.errors import OptionInvalid

_DISTANCE = re.compile(r"([+-])(\d\d):(\d\d)", re.ASCII)
NUMBER_MAX = 2**63 - 1


class OptionKind(Protocol):
    """Makes the value of an option from its text."""

    def parse(self, name: str, text: str) -> Any:
        """Raises OptionInvalid. `text` is stripped and not empty."""


@dataclass(frozen=True, slots=True)
class Text:
    """Any text of at most `chars_max` characters."""

    chars_max: int = 16 << 20

    def parse(self, name: str, text: str) -> str:
        if len(text) > self.chars_max:
            raise OptionInvalid(
                f"{name} has {len(text)} characters", f"Give at most {self.chars_max}."
            )
        return text


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `at_least` to `at_most`."""

    at_least: int = 1
    at_most: int = NUMBER_MAX

    def parse(self, name: str, text: str) -> int:
        value = _whole(text)
        if value is None or not self.at_least <= value <= self.at_most:
            bounds = f"of {self.at_least} or more"
            if self.at_most < NUMBER_MAX:
                bounds = f"from {self.at_least} to {self.at_most}"
            raise OptionInvalid(
                f"{name} is {text!r}, not a whole number {bounds}",
                f"Give {name} such a number.",
            )
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    def parse(self, name: str, text: str) -> bool:
        if text.lower() not in ("true", "false"):
            raise OptionInvalid(f"{name} is {text!r}", f"Give {name} true or false.")
        return text.lower() == "true"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the words, in upper or lower case."""

    words: tuple[str, ...]

    def parse(self, name: str, text: str) -> str:
        for word in self.words:
            if word.lower() == text.lower():
                return word
        raise OptionInvalid(f"{name} is {text!r}", f"Give {name} one of {', '.join(self.words)}.")


@dataclass(frozen=True, slots=True)
class Bytes:
    """A size as 1048576, 1024k, 1m or 1mb, in units of 1024."""

    at_least: int = 1

    def parse(self, name: str, text: str) -> int:
        value = units.parse(text.lower(), units.SPARK_BYTES)
        if value is None or not self.at_least <= value <= NUMBER_MAX:
            raise OptionInvalid(
                f"{name} is {text!r}, not a size of {self.at_least} bytes or more",
                f"Give {name} bytes, or a size as 512k, 64m or 2g.",
            )
        return value


@dataclass(frozen=True, slots=True)
class Millis:
    """A time as 900000, 900s, 15m or 1h; a number without a unit is milliseconds, as in Spark."""

    def parse(self, name: str, text: str) -> int:
        value = units.parse(text.lower(), units.SPARK_MS)
        if value is None or value > NUMBER_MAX:
            raise OptionInvalid(
                f"{name} is {text!r}, not a length of time",
                f"Give {name} milliseconds, or a time as 500ms, 30s, 15m or 1h.",
            )
        return value


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression for whole names."""

    def parse(self, name: str, text: str) -> str:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise OptionInvalid(
                f"{name} is {text!r}, which is not a regular expression: {error}",
                f"Give {name} a pattern as flights-.* for whole names of topics.",
            ) from None
        return text


@dataclass(frozen=True, slots=True)
class Zone:
    """A time zone by its region, or by its distance from UTC as +05:30."""

    def parse(self, name: str, text: str) -> datetime.tzinfo:
        try:
            return _zone_by_distance(text) or ZoneInfo(text)
        except (ValueError, KeyError, OSError):  # an unknown region is a KeyError
            raise OptionInvalid(
                f"{name} is {text!r}, which is not a time zone",
                f"Give {name} as Europe/Berlin, UTC or +01:00.",
            ) from None


@dataclass(frozen=True, slots=True)
class Keys:
    """One key as plain text, or several keys as a JSON list of texts; the value is their UTF-8
    bytes."""

    count_max: int = 10_000

    def parse(self, name: str, text: str) -> tuple[bytes, ...]:
        if not text.startswith("["):
            return (text.encode(),)
        texts = json_of(name, text, '["AA","DL"]')
        keys = [_utf8(key) for key in texts] if isinstance(texts, list) else []
        if not 0 < len(keys) <= self.count_max or None in keys:
            raise OptionInvalid(
                f"{name} is {quoted(text)}, not a list of 1 to {self.count_max} texts",
                f'Give {name} one key, or several as ["AA","DL"].',
            )
        return tuple(dict.fromkeys(key for key in keys if key is not None))


def json_of(name: str, text: str, example: str) -> Any:
    """`text`, parsed as JSON. Raises OptionInvalid, also for an object with a name twice."""
    try:
        return json.loads(text, object_pairs_hook=unique_object)
    except (ValueError, RecursionError):
        raise OptionInvalid(
            f"{name} is {quoted(text)}, which is not JSON", f"Give {name} as {example}."
        ) from None


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: the object of these pairs. Raises ValueError if a name is there twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name is given twice")
    return members


def _zone_by_distance(text: str) -> datetime.tzinfo | None:
    """The zone of +05:30. Raises ValueError for a distance of a day or more."""
    match = _DISTANCE.fullmatch(text)
    if match is None:
        return None
    minutes = int(match[2]) * 60 + int(match[3])
    return datetime.timezone(datetime.timedelta(minutes=-minutes if match[1] == "-" else minutes))


def _utf8(value: object) -> bytes | None:
    try:
        return value.encode() if isinstance(value, str) else None
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def quoted(text: str) -> str:
    """The text as errors show it, cut to 200 characters."""
    return repr(text if len(text) <= 200 else text[:200] + "...")


def _whole(text: str) -> int | None:
    digits = text.removeprefix("-").removeprefix("+")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None


def option_text(value: object) -> str:
    """A Python value as the text of an option, written as Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
