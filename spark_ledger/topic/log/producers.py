"""How far producers have come: what is remembered of them by name, those that sent last. Pure.

Always true: clients choose the names, so what is remembered has a limit in bytes beside its limit
in names (hazard 95): as JSON, which is how a seal and a checkpoint have it. In a commit and in a
state all partitions of a topic share PRODUCERS_TOGETHER_BYTES_MAX: a commit's body and a
checkpoint's root are within their own limits then.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from spark_ledger.topic.log.actions import Action, SealLive

PRODUCER_NAME_BYTES_MAX = 1024
"""In UTF-8. A broker takes no producer of a longer name."""
PRODUCERS_MAX = 10_000
PRODUCERS_BYTES_MAX = 1 << 20
"""Of a partition."""
PRODUCERS_TOGETHER_BYTES_MAX = 32 << 20
_BESIDE_BYTES = 24
"""Of each name: its sequence id, with what separates them."""


def json_bytes(names: Collection[str]) -> int:
    """How many bytes these producers take in a record, at most."""
    return len(json.dumps(list(names))) + _BESIDE_BYTES * len(names)


def bytes_of_each(partitions: int) -> int:
    """How many bytes the producers of each of so many partitions may take."""
    return min(PRODUCERS_BYTES_MAX, PRODUCERS_TOGETHER_BYTES_MAX // max(1, partitions))


def newest(producers: Mapping[str, int], bytes_max: int | None = None) -> dict[str, int]:
    """Those at the end, which sent last, PRODUCERS_MAX of them at most, in so many bytes
    (PRODUCERS_BYTES_MAX). Where not all fit, a name that brokers take no more is left out."""
    room = PRODUCERS_BYTES_MAX if bytes_max is None else bytes_max
    names = list(producers)[-PRODUCERS_MAX:]
    if json_bytes(names) > room:
        kept = list[str]()
        for name in reversed(names):
            if len(name.encode()) > PRODUCER_NAME_BYTES_MAX:
                continue
            room -= json_bytes((name,))
            if room < 0:
                break
            kept.append(name)
        names = kept[::-1]
    return {name: producers[name] for name in names}


def with_last(
    before: Mapping[str, int], more: Iterable[tuple[str, int]], bytes_max: int | None = None
) -> Mapping[str, int]:
    """The last sequence ids, those that changed last at the end, the `newest` of them."""
    last = dict(before)
    for name, sequence_id in more:
        last[name] = max(sequence_id, last.pop(name, sequence_id))
    return newest(last, bytes_max)


def with_fewer_producers(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The seals among the actions with the producers that sent last, which fit into one commit
    together."""
    sealing = [a for a in actions if isinstance(a, SealLive) and a.producers]
    most = bytes_of_each(len(sealing))

    def cut(action: Action) -> Action:
        if not isinstance(action, SealLive) or not action.producers:
            return action
        return replace(action, producers=tuple(newest(dict(action.producers), most).items()))

    return tuple(map(cut, actions))
