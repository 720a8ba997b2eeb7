"""What a commit is too big for: payloads and bodies that go to ledgers before the multi is sent.

Always true: payloads of more than INLINE_COMMIT_BYTES_MAX over the whole commit are written once,
to ledgers of their topics, and committed as ordinary segments; a body that is too large is written
packed and its node points to it. No other writer has the ledgers until `let_go`, and the multi
checks their records, so a janitor that recovered or deleted one makes it fail.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.metadata.store import Check, MetadataStore
from spark_ledger.metadata.store_calls import each
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.draft import Actions
from spark_ledger.topic.log import records
from spark_ledger.topic.log.blobs import Blobs, HeldLedgers, moved_segments, pack
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.records import Spilled
from spark_ledger.topic.log.topics import policies_now

BODY_BYTES_MAX = 64 * 1024 * 1024
LEDGERS_AT_ONCE = 32  # of a commit over many topics
POINTER_BYTES_MAX = 512
"""The node of a body that is in a ledger."""


@dataclass(frozen=True, slots=True)
class LogNode:
    """What log/<n> holds, and the ledger that the body is in, if it is in one."""

    value: bytes
    ledger: int | None = None


class CommitPayloads:
    """Of one commit."""

    def __init__(self, store: MetadataStore, blobs: Blobs, commit_id: str) -> None:
        self._store = store
        self._commit_id = commit_id
        self._blobs = blobs
        self._stack = AsyncExitStack()
        self._held: dict[str, HeldLedgers] = {}
        self._moved: Mapping[str, Actions] | None = None
        self._spilled: dict[str, tuple[bytes, LogNode]] = {}

    async def moved(
        self, intent: Intent, drafts: Mapping[str, Actions], inline_bytes_max: int
    ) -> Mapping[str, Actions]:
        """The actions, without payloads if there are more than `inline_bytes_max` bytes of them.

        Raises errors.LedgerFenced, errors.NotEnoughBookies, errors.Unavailable.
        """
        if commit_draft.inline_bytes(drafts) <= inline_bytes_max:
            return drafts
        if self._moved is None:
            moved = await each(
                lambda one: self._move(intent, *one), drafts.items(), LEDGERS_AT_ONCE
            )
            self._moved = dict(zip(drafts, moved, strict=True))
        return self._moved

    async def nodes(
        self, intent: Intent, bodies: Mapping[str, bytes], other_bytes: int
    ) -> dict[str, LogNode]:
        """What the log of each topic gets, in a multi of `other_bytes` beside. Raises as `moved`,
        and errors.CommitTooBig."""
        for topic_id, body in bodies.items():
            if len(body) > BODY_BYTES_MAX:
                raise errors.CommitTooBig(
                    f"the body of a commit to topic {topic_id} takes {len(body)} bytes, at most"
                    f" {BODY_BYTES_MAX} fit",
                    bytes=len(body),
                )
        beside = other_bytes + POINTER_BYTES_MAX * len(bodies)
        spilled = commit_draft.to_spill(bodies, beside)
        nodes = {topic_id: LogNode(body) for topic_id, body in bodies.items()}
        stored = await each(
            lambda topic_id: self._spill(intent, topic_id, bodies[topic_id]),
            spilled,
            LEDGERS_AT_ONCE,
        )
        return {**nodes, **dict(zip(spilled, stored, strict=True))}

    async def checks(self) -> list[Check]:
        """For the multi: the records of the ledgers written to, as they are now. Raises
        errors.NoSuchLedger, errors.RowsLost when one is not whole any more: `let_go`, then again.
        """
        found = await each(lambda held: held.checks(), self._held.values())
        return [check for checks in found for check in checks]

    async def let_go(self) -> None:
        """The ledgers go back; what was written is forgotten."""
        self._held.clear()
        self._spilled.clear()
        self._moved = None
        await self._stack.aclose()

    async def _move(self, intent: Intent, topic_id: str, actions: Actions) -> Actions:
        inline = commit_draft.inline_segments(actions)
        if not inline:
            return actions
        held = await self._held_for(intent, topic_id)
        payloads = [payload for segment in inline for payload in segment.inline]
        rows = [count for segment in inline for count in segment.entry_rows]
        stored = await held.store(payloads, rows)
        return commit_draft.with_moved(actions, moved_segments(inline, stored))

    async def _spill(self, intent: Intent, topic_id: str, body: bytes) -> LogNode:
        """The body in a ledger: written once, as long as it stays the same."""
        written = self._spilled.get(topic_id)
        if written is not None and written[0] == body:
            return written[1]
        held = await self._held_for(intent, topic_id)
        pointer = await held.write(pack(body))
        node = LogNode(records.encode_spilled(Spilled(self._commit_id, pointer)), pointer.ledger_id)
        assert len(node.value) <= POINTER_BYTES_MAX, "a pointer is small"
        self._spilled[topic_id] = (body, node)
        return node

    async def _held_for(self, intent: Intent, topic_id: str) -> HeldLedgers:
        if topic_id not in self._held:
            now = await policies_now(self._store, topic_id)
            self._held[topic_id] = await self._stack.enter_async_context(
                self._blobs.held(intent, topic_id, now.policies)
            )
        return self._held[topic_id]
