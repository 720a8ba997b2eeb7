"""The last sequence id of each producer, by the producer's name; only the producers that sent last
are kept. Pure.

Always true: clients choose the names, so the number of kept producers is limited, and so are the
bytes of their JSON in a seal or checkpoint (hazard 95). In a commit and in a state all
partitions of a topic share PRODUCERS_TOGETHER_BYTES_MAX, so that a commit's body and a checkpoint's
root stay within their own limits.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from spark_ledger.topic.log.actions import Action, SealLive

PRODUCER_NAME_BYTES_MAX = 1024
"""In UTF-8. A broker takes no producer of a longer name."""
PRODUCERS_MAX = 10_000
PRODUCERS_BYTES_MAX = 1 << 20
"""For one partition."""
PRODUCERS_TOGETHER_BYTES_MAX = 32 << 20
_OTHER_BYTES = 24
"""What a producer takes beside its name: the sequence id and separators."""


def record_bytes(names: Collection[str]) -> int:
    """How many bytes these producers take in a record, at most."""
    return len(json.dumps(list(names))) + _OTHER_BYTES * len(names)


def bytes_per_partition(partitions: int) -> int:
    """How many bytes the producers of one partition may take if `partitions` partitions have
    producers."""
    return min(PRODUCERS_BYTES_MAX, PRODUCERS_TOGETHER_BYTES_MAX // max(1, partitions))


def newest_producers(producers: Mapping[str, int], bytes_max: int | None = None) -> dict[str, int]:
    """The producers at the end, which sent last: PRODUCERS_MAX at most, of `bytes_max` together at
    most (PRODUCERS_BYTES_MAX by default). If not all fit, producers with names that are too long
    for today's brokers are left out first."""
    bytes_left = PRODUCERS_BYTES_MAX if bytes_max is None else bytes_max
    names = list(producers)[-PRODUCERS_MAX:]
    if record_bytes(names) > bytes_left:
        kept = list[str]()
        for name in reversed(names):
            if len(name.encode()) > PRODUCER_NAME_BYTES_MAX:
                continue
            bytes_left -= record_bytes((name,))
            if bytes_left < 0:
                break
            kept.append(name)
        names = kept[::-1]
    return {name: producers[name] for name in names}


def with_sequence_ids(
    before: Mapping[str, int], more: Iterable[tuple[str, int]], bytes_max: int | None = None
) -> Mapping[str, int]:
    """The sequence ids after `more`: the producers that changed last are at the end, and only the
    `newest_producers` stay."""
    last = dict(before)
    for name, sequence_id in more:
        last[name] = max(sequence_id, last.pop(name, sequence_id))
    return newest_producers(last, bytes_max)


def with_fewer_producers(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The actions, with fewer producers in their seals: those that sent last and fit into one
    commit together."""
    sealing = [a for a in actions if isinstance(a, SealLive) and a.producers]
    bytes_max = bytes_per_partition(len(sealing))

    def cut(action: Action) -> Action:
        if not isinstance(action, SealLive) or not action.producers:
            return action
        return replace(
            action, producers=tuple(newest_producers(dict(action.producers), bytes_max).items())
        )

    return tuple(map(cut, actions))
