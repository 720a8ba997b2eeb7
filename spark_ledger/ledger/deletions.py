"""Removes the records of ledgers, and names the ledgers as deleted in the same multi.

Always true: a record is removed only by a multi that names its ledger as deleted
(metadata/deleted_ledgers.py), checks the conditions of the caller, and checks that the store is not
held. All deletions that are requested while a write is under way share the next multi: separate
multis would fail one another, because they write the same set of deleted ledgers. If that multi
fails, it has changed nothing, and each deletion is tried by itself.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from spark_ledger.metadata import deleted_ledgers, paths
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.deleted_ledgers import BadDeletedSet
from spark_ledger.metadata.store import (
    BadVersion,
    Delete,
    MetadataStore,
    MultiFailed,
    NoNode,
    Operation,
)

TOGETHER_MAX = 100  # deletions of one multi


class ConditionFailed(Exception):
    """A condition of the deletion does not hold."""


@dataclass(frozen=True, slots=True)
class _Deletion:
    ledger_id: int
    version: int
    conditions: tuple[Operation, ...]
    done: asyncio.Future[None]


class Deletions:
    """The deletions of one process."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._waiting: deque[_Deletion] = deque()
        self._write_task: asyncio.Task[None] | None = None

    async def remove(
        self, ledger_id: int, version: int, conditions: Sequence[Operation] = ()
    ) -> None:
        """Remove the record and name the ledger as deleted, in one multi that checks the record's
        version and the `conditions`.

        Raises ConditionFailed; NoNode, BadVersion (of the record); errors.MetadataHeld,
        BadDeletedSet, StoreError.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append(_Deletion(ledger_id, version, tuple(conditions), done))
        if self._write_task is None:
            self._write_task = loop.create_task(self._write_waiting())
        await done

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                count = min(len(self._waiting), TOGETHER_MAX)
                batch = [self._waiting.popleft() for _ in range(count)]
                if count == 1 or not await self._write_together(batch):
                    for deletion in batch:
                        await self._write_alone(deletion)
        finally:
            self._write_task = None

    async def _write_together(self, batch: Sequence[_Deletion]) -> bool:
        """Write the deletions in one multi. False if the multi failed and so changed nothing: no
        deletion has its outcome yet."""
        try:
            await multi_unless_held(self._metadata, await self._operations(batch))
        except (MultiFailed, NoNode, BadDeletedSet):
            return False
        except Exception as error:
            _resolve_all(batch, error)
        else:
            _resolve_all(batch, None)
        return True

    async def _write_alone(self, deletion: _Deletion) -> None:
        outcome: Exception | None = None
        try:
            while True:
                try:
                    operations = await self._operations([deletion])
                    await multi_unless_held(self._metadata, operations)
                    break
                except MultiFailed as failure:
                    at = failure.index - len(deletion.conditions)
                    if at < 0:
                        raise ConditionFailed from failure
                    if at > 0 or not isinstance(failure.cause, BadVersion | NoNode):
                        raise failure.cause from None
                # another ledger of the folder was deleted meanwhile, by another process
                await self._metadata.sync(paths.ledger_folder(deletion.ledger_id))
        except Exception as error:
            outcome = error
        _resolve_all([deletion], outcome)

    async def _operations(self, batch: Sequence[_Deletion]) -> list[Operation]:
        """The conditions, the writes that name the ledgers, then the deletes of the records."""
        ids = [deletion.ledger_id for deletion in batch]
        writes = await deleted_ledgers.writes_that_name(self._metadata, ids)
        conditions = [operation for deletion in batch for operation in deletion.conditions]
        records = [Delete(paths.ledger(d.ledger_id), d.version) for d in batch]
        return [*conditions, *writes, *records]


def _resolve_all(batch: Sequence[_Deletion], error: Exception | None) -> None:
    for deletion in batch:
        if deletion.done.done():  # its caller was cancelled
            continue
        if error is None:
            deletion.done.set_result(None)
        else:
            deletion.done.set_exception(error)
