"""Settings that differ in a few from others."""

from typing import Any, TypeVar

from bookie_server.api.settings import Settings

S = TypeVar("S", bound=Settings)


def with_settings(settings: S, **changes: Any) -> S:
    """Those, with `changes`, checked as if they were read."""
    return type(settings)(**{**settings.model_dump(exclude_unset=True), **changes})
