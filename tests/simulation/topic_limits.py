"""Limits of the topic layer made small in some runs, so that a dozen commits meet what a million
would: chunks, roots and bodies in ledgers, checkpoints every few commits, memories that are full.

Always true: they are drawn from the seed, hold for the whole run, and are what they were after it.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from spark_ledger.topic import checkpointer
from spark_ledger.topic.commit import commit
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit import views as commit_views
from spark_ledger.topic.commit.commit import CommitPayloads
from spark_ledger.topic.log import checkpoint, topic_log
from spark_ledger.topic.upkeep import garbage

Noted = Callable[[str, str, bytes], None]
"""Called with commit id, topic id and body before a commit is sent."""


@dataclass(frozen=True)
class TopicLimits:
    """`every`: a checkpoint is made after so many commits; `grace_ms`: what subscriptions had so
    long ago is held."""

    every: int
    grace_ms: int
    small: Mapping[tuple[ModuleType, str], Any]


def draw_limits(rng: random.Random) -> TopicLimits:
    """The limits of a run: half of them as they are in production, but for checkpoints."""
    every = rng.choice((2, 3, 5, 8))
    grace_ms = rng.choice((0, 2_000, 5_000))
    drawn: dict[tuple[ModuleType, str], Any] = {
        (checkpoint, "TAIL_BYTES_MAX"): rng.choice((0, 2_000)),
        (checkpoint, "CHUNK_BYTES_MAX"): 1_500,
        (checkpointer, "ROOT_INLINE_BYTES_MAX"): rng.choice((0, 64 * 1024)),
        (commit, "INLINE_COMMIT_BYTES_MAX"): rng.choice((300, 32 * 1024)),
        (commit_draft, "BODY_INLINE_BYTES_MAX"): rng.choice((400, 64 * 1024)),
        (commit_views, "UNFOLDED_MAX"): 2,
        (garbage, "UNPUBLISHED_MS"): rng.choice((0, 3_000)),
        (topic_log, "FOLDED_MAX"): 2 * every,
        (topic_log, "LOOK_AGAIN_COMMITS"): every,
    }
    return TopicLimits(every, grace_ms, drawn if rng.random() < 0.5 else {})


@contextmanager
def limited(limits: TopicLimits, noted: Noted) -> Iterator[None]:
    """Production code with these limits, telling the bodies it is about to commit."""
    nodes = CommitPayloads.nodes

    async def told(self: CommitPayloads, intent: Any, bodies: Any, other_bytes: int) -> Any:
        for topic_id, body in bodies.items():
            noted(self._commit_id, topic_id, body)
        return await nodes(self, intent, bodies, other_bytes)

    before = {key: getattr(*key) for key in limits.small}
    try:
        CommitPayloads.nodes = told  # type: ignore[method-assign]
        for (module, name), value in limits.small.items():
            setattr(module, name, value)
        yield
    finally:
        CommitPayloads.nodes = nodes  # type: ignore[method-assign]
        for (module, name), value in before.items():
            setattr(module, name, value)
