"""What callers hand over, checked at the door: wrong use is a TypeError or ValueError that names
the argument and what it was given, never an error from deep inside.

Always true: nothing here changes anything; a password is in no text.
"""

import math
from collections.abc import Mapping
from numbers import Real
from operator import index
from typing import Any

from spark_ledger.config import ClientConfig

LEDGER_ID_MAX = 2**63 - 1
DURABILITIES = ("synced", "page-cache")


def check_client(service_url: object, config: object) -> None:
    if service_url is not None and not isinstance(service_url, str):
        raise TypeError(f"service_url is a str, got {_kind(service_url)}")
    if config is not None and not isinstance(config, ClientConfig):
        raise TypeError(
            "config is a ClientConfig (spark_ledger.config.client_config makes one),"
            f" got {_kind(config)}"
        )


def whole(name: str, value: Any) -> int:
    """The value as an int: an int, or what stands for one (of numpy, say); no bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an int, got {value!r}")
    return index(value)


def whole_or(name: str, value: Any, default: int) -> int:
    return default if value is None else whole(name, value)


def ledger_id_of(value: Any) -> int:
    ledger_id = whole("ledger_id", value)
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise ValueError(f"ledger_id is 0 to {LEDGER_ID_MAX}, got {ledger_id}")
    return ledger_id


def entry_id_of(name: str, value: Any, least: int = 0) -> int:
    entry_id = whole(name, value)
    if entry_id < least:
        raise ValueError(f"{name} is {least} or more, got {entry_id}")
    return entry_id


def entries_of(first: Any, last: Any) -> tuple[int, int]:
    """A range of entries, both ends included; `last` right before `first` is none at all."""
    first, last = entry_id_of("first", first), whole("last", last)
    if last < first - 1:
        least = f"last is {first - 1} or more ({first - 1}: nothing)"
        raise ValueError(f"{least} where first is {first}, got {last}")
    return first, last


def seconds(name: str, value: Any) -> float:
    wrong = f"{name} is a number of seconds, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(wrong)
    if math.isnan(value):
        raise ValueError(wrong)
    return float(value)


def password_of(value: object) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"password is bytes, got {_kind(value)}")
    return bytes(value)


def durability_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"durability is a str, got {_kind(value)}")
    if value not in DURABILITIES:
        raise ValueError(f"durability is 'synced' or 'page-cache', got {value!r}")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a bool, got {_kind(value)}")
    return value


def metadata_of(value: object) -> dict[str, str]:
    """What a ledger's record can keep: text by text."""
    if not isinstance(value, Mapping):
        raise TypeError(f"metadata is a mapping of str to str, got {_kind(value)}")
    for key, text in value.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata: a key is a str, got {key!r} ({_kind(key)})")
        if not isinstance(text, str):
            raise TypeError(f"metadata: the value of {key!r} is a str, got {_kind(text)}")
        _check_text(f"the key {key!r}", key)
        _check_text(f"the value of {key!r}", text)
    return dict(value)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        found = text[wrong.start]
        raise ValueError(f"metadata: {what} is no text: {found!r} at {wrong.start}") from None


def _kind(value: object) -> str:
    return type(value).__name__
