"""What a command line asks for, checked before anything runs.

Always true: what is refused here raises ValueError with a sentence that names what is wrong; what
is let through can be run by every seed asked for.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tests.simulation.chaos import FAULTS, Plan
from tests.simulation.plan import ALSO, CHUNKS, LATE_ALSO, RACKS, REWINDS
from tests.simulation.replay import changed_plan, drawn_plan

_TOGETHER = ("quorum", "bookies")

MUTANT_HELP = "a known bug to put in: its name, its report (BK#2614, D1) or a part of them"


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `least` on."""

    def whole(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    whole.__name__ = "whole number"
    return whole


# -- plans ----------------------------------------------------------------------------------------


def plan_changes(text: str, seeds: Sequence[int], others: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of plans that a command line gives as JSON, for these seeds, on top of `others`
    (a mutant's). Raises ValueError."""
    try:
        changes = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(changes, dict):
        raise ValueError(f"changes are a JSON object, not {text}")
    known = [each.name for each in fields(Plan)]
    for name, value in changes.items():
        if name not in known:
            raise ValueError(f"a plan has no {name!r}; it has {', '.join(known)}")
        _CHECKS[name](name, value)
    _enough_bookies({**others, **changes}, seeds)
    for seed in seeds[:1]:
        changed_plan(seed, {**others, **changes})
    return changes


def with_reseeds(plan: str, reseeds: Sequence[str]) -> str:
    """The plan's changes, as JSON, with `SITUATION:NUMBER` of the command line among them. Raises
    ValueError."""
    if not reseeds:
        return plan
    points = [one.rpartition(":") for one in reseeds]
    wrong = [one for one, point in zip(reseeds, points, strict=True) if not point[2].isdigit()]
    if wrong:
        raise ValueError(f"a reseed is SITUATION:NUMBER, not {wrong[0]}")
    return json.dumps({**json.loads(plan), "reseeds": [[name, int(n)] for name, _, n in points]})


def _enough_bookies(changes: Mapping[str, Any], seeds: Sequence[int]) -> None:
    if not any(name in changes for name in _TOGETHER):
        return
    both = all(name in changes for name in _TOGETHER)
    for seed in seeds[:1] if both else seeds:
        drawn = None if both else drawn_plan(seed)
        quorum, bookies = (changes.get(name, getattr(drawn, name, None)) for name in _TOGETHER)
        if bookies < quorum[0]:
            of = "" if both else f" in seed {seed}, whose other number is drawn; give both"
            raise ValueError(f"{bookies} bookies are too few for E={quorum[0]}{of}")


def _classes(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name} is a list of fault classes, not {json.dumps(value)}")
    unknown = [one for one in value if one not in FAULTS]
    if unknown:
        raise ValueError(f"{name}: no fault class {unknown[0]!r}; there are {', '.join(FAULTS)}")


def _ways(name: str, value: Any) -> None:
    known = {**ALSO, **REWINDS, **LATE_ALSO, **CHUNKS}
    if not isinstance(value, list) or any(one not in known for one in value):
        raise ValueError(f"{name} is a list of {', '.join(known)}, not {json.dumps(value)}")


def _racks(name: str, value: Any) -> None:
    if value not in RACKS:
        raise ValueError(f'{name} is "soft", "hard" or "" (none), not {json.dumps(value)}')


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _whole(least: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not _is_whole(value, least):
            raise ValueError(f"{name} is a whole number, at least {least}, not {json.dumps(value)}")

    return check


def _seconds(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is a number of seconds above 0, not {json.dumps(value)}")


def _share(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value <= 1):
        raise ValueError(f"{name} is a share from 0 to 1, or null, not {json.dumps(value)}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is true or false, not {json.dumps(value)}")


def _indexes(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(_is_whole(one, 0) for one in value):
        raise ValueError(f"{name} is a list of events' indexes, not {json.dumps(value)}")


def _reseeds(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and _is_whole(one[1], 0)
        for one in value
    ):
        raise ValueError(f"{name} is a list of [situation, number], not {json.dumps(value)}")


def _entries(name: str, value: Any) -> None:
    pair = isinstance(value, list) and len(value) == 2 and all(_is_whole(n, 1) for n in value)
    if not pair or value[0] > value[1]:
        told = json.dumps(value)
        raise ValueError(f"{name} is a pair [fewest, most] with 1 <= fewest <= most, not {told}")


def _quorum(name: str, value: Any) -> None:
    three = isinstance(value, list) and len(value) == 3 and all(_is_whole(n, 1) for n in value)
    if not three or not value[0] >= value[1] >= value[2]:
        raise ValueError(f"{name} is [E, Qw, Qa] with E >= Qw >= Qa >= 1, not {json.dumps(value)}")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("bookies", "streams", "journals", "directories"), _whole(1)),
    **dict.fromkeys(("recoverers", "tailers", "writers", "large", "places"), _whole(0)),
    **dict.fromkeys(("chaos_s", "between_s", "add_timeout_s"), _seconds),
    **dict.fromkeys(("topics", "password", "announce", "delayed", "churn"), _flag),
    **dict.fromkeys(("old_readers", "over_budget", "tight"), _flag),
    **dict.fromkeys(
        ("operators", "lasting", "own_policy", "page_cache", "healing", "brokers", "ledgers"), _flag
    ),
    "racks": _racks,
    **dict.fromkeys(("faults", "without"), _classes),
    "quorum": _quorum,
    "also": _ways,
    "entries": _entries,
    "skip": _indexes,
    "reseeds": _reseeds,
    "slow": _share,
}
"""By field of a plan."""
