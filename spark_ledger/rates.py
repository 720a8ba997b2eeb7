"""Rates: how much may pass in a time, as text, and how much of it has passed. Pure.

    200 messages, 1048576 bytes, 30 s, relative

Always true: over a long time no more passes than the rate allows, and what passed last before the
allowance was used up. Callers give the time; it never goes back.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields

_NUMBER_MAX = 2**63 - 1
_PART = re.compile(r"([1-9][0-9]{0,18}) (messages|bytes|requests|s)", re.ASCII)
_RELATIVE = "relative"


@dataclass(frozen=True, slots=True)
class Rate:
    """So many messages, bytes or requests in `s` seconds; None: no limit. `relative`: beside as
    many as came meanwhile."""

    messages: int | None = None
    bytes: int | None = None
    requests: int | None = None
    s: int = 1
    relative: bool = False

    @staticmethod
    def parse(text: object) -> "Rate | None":
        """The rate of a text; None for any other text."""
        values: dict[str, int | bool] = {}
        for part in text.split(", ") if isinstance(text, str) else [""]:
            match = _PART.fullmatch(part)
            name = match[2] if match is not None else part
            if name in values or (match is None and part != _RELATIVE):
                return None
            values[name] = True if match is None else int(match[1])
            if values[name] > _NUMBER_MAX:
                return None
        return Rate(**values) if values.keys() - {"s", _RELATIVE} else None  # type: ignore[arg-type]

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value for name, value in values.items() if value and name != _RELATIVE}
        if self.s == 1:
            del shown["s"]
        parts = [f"{value} {name}" for name, value in shown.items()]
        return ", ".join([*parts, _RELATIVE] if self.relative else parts)


def _nothing() -> tuple[int, int]:
    return 0, 0


class Allowance:
    """What may pass at a rate. It begins with that of one period, and never has more. `came`
    returns how many messages and bytes came so far, for a rate that is relative to them: as many
    more may pass, for a period after they came."""

    def __init__(self, came: Callable[[], tuple[int, int]] = _nothing) -> None:
        self.rate: Rate | None = None
        self._came = came
        self._came_before = (0, 0)
        self._left = [0.0, 0.0]  # messages, bytes
        self._beside = [0.0, 0.0]  # that came lately
        self._counted_s = 0.0

    def change(self, rate: Rate | None, now_s: float) -> None:
        """From now on the rate is this one; a rate that stays goes on."""
        if rate != self.rate:
            self.rate, self._counted_s = rate, now_s
            self._came_before = self._came()
            self._left = [float(limit or 0) for limit in self._limits()]
            self._beside = [0.0, 0.0]

    def _limits(self) -> tuple[int | None, int | None]:
        return (None, None) if self.rate is None else (self.rate.messages, self.rate.bytes)

    def take(self, messages: int, size: int) -> None:
        """Note what passes. If it is more than is allowed, the next one waits for longer."""
        self._left[0] -= messages
        self._left[1] -= size

    def wait_s(self, now_s: float) -> float:
        """In how many seconds the next one may pass; 0: now."""
        rate, wait_s = self.rate, 0.0
        if rate is None:
            return wait_s
        passed_s, self._counted_s = max(0.0, now_s - self._counted_s), now_s
        came, before = self._came(), self._came_before
        self._came_before = came
        for index, limit in enumerate(self._limits()):
            if limit is not None:
                beside = came[index] - before[index] if rate.relative else 0
                self._beside[index] = beside + self._beside[index] * max(0, 1 - passed_s / rate.s)
                grown = self._left[index] + passed_s * limit / rate.s + beside
                self._left[index] = min(grown, limit + self._beside[index])
                if self._left[index] < 1:
                    wait_s = max(wait_s, (1 - self._left[index]) * rate.s / limit)
        return wait_s
