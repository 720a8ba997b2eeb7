"""How settings are read: a toml file, then overrides, checked against a pydantic class.

Always true: a key that the class lacks is refused, with the most similar key, if any is similar; an
error is one line, with the wrong value and no other value; an override wins over the file, the file
over the default; no setting has another source.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

SCHEME, PORT_DEFAULT = "zk", 2281
DEFAULT_SERVICE_URL = f"{SCHEME}://127.0.0.1:{PORT_DEFAULT}/ledger"
VALUE_CHARS_MAX = 80
PLUGINS_VARIABLE = "PYDANTIC_DISABLE_PLUGINS"


class BadSettings(ValueError):
    """A file, a key or a value is wrong; the text names it and the most similar setting."""


class _WithoutPlugins(type(BaseModel)):  # type: ignore[misc]
    """Makes a class without pydantic's plugins: the search for plugins reads the metadata of every
    installed package, which takes 60 to 70 ms in every process that has settings."""

    def __new__(cls, *args: Any, **keywords: Any) -> type:
        before = os.environ.get(PLUGINS_VARIABLE)  # only the environment turns plugins off
        os.environ[PLUGINS_VARIABLE] = "__all__"
        try:
            return super().__new__(cls, *args, **keywords)  # type: ignore[no-any-return]
        finally:
            del os.environ[PLUGINS_VARIABLE]
            if before is not None:
                os.environ[PLUGINS_VARIABLE] = before


_METACLASS: Any = _WithoutPlugins


class Settings(BaseModel, metaclass=_METACLASS):  # type: ignore[metaclass]
    """Base of every class of settings: it refuses unknown keys and numbers that are not finite; its
    values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def load(kind: type[S], file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> S:
    """The settings of `kind` from `file` (None: defaults only) and `overrides`.

    Raises BadSettings, with all errors in one line.
    """
    values = {**(_read(file) if file else {}), **(overrides or {})}
    source = f"{file}: " if file else ""
    unknown = [_unknown(key, kind) for key in values if key not in kind.model_fields]
    if unknown:
        raise BadSettings(source + "; ".join(unknown))
    try:
        return kind(**values)
    except ValidationError as error:
        problems = "; ".join(_problem(detail) for detail in error.errors())
        raise BadSettings(source + problems) from None


def parse_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """`key=value` texts as a mapping. Raises BadSettings for a text without "="."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise BadSettings(f"a setting is given as key=value, got {pair!r}")
        overrides[key.strip()] = value.strip()
    return overrides


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSettings(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSettings(f"{file} is no toml file: {error}") from None


def _unknown(key: str, kind: type[Settings]) -> str:
    near = difflib.get_close_matches(key, kind.model_fields, n=1)
    return f"unknown setting {key!r}" + (f"; the nearest is {near[0]!r}" if near else "")


def _problem(detail: Any) -> str:
    """The error of one setting, with its value; or of several settings that disagree."""
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return str(message)
    name = ".".join(str(part) for part in detail["loc"])
    return f"{name}: {message}, got {_short(detail.get('input'))}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}..."
