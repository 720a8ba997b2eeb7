"""At start: what the journal holds beyond the checkpoint goes to the stores, and damage is judged.

Always true:
- every whole record is applied, also those of a batch that was torn: applying what was never
  acknowledged is allowed, forgetting what was is not; applying twice changes nothing;
- bytes beyond the last position known to be synced that cannot be read are a torn write: nothing
  in them was acknowledged, they are cut and the node serves;
- bytes below it that cannot be read are damage: whose they are known puts that ledger in limbo
  (and fences it, unless the record was an entry: it may have been a fence); whose they are
  unknown puts every ledger in limbo and makes the node read-only. Limbo is durable before the
  checkpoint moves past the damage.
"""

import logging
from dataclasses import replace

from bookie_server import checkpoint
from bookie_server.disk import Disk
from bookie_server.entry_index import EVERY_LEDGER, LedgerState, decode_ledger_state
from bookie_server.journal import FOLDER, Journal, Replay
from bookie_server.journal_format import Kind, Position, Record, Suspect
from bookie_server.ledger_storage import LedgerStorage
from bookie_server.storage_config import StorageConfig

_log = logging.getLogger(__name__)


async def open_journal(
    journal_disk: Disk, ledger_disk: Disk, storage: LedgerStorage, config: StorageConfig
) -> Journal:
    """Replay, flush, and begin a new segment; the checkpoint is at its start when this returns.

    Raises DiskFailed.
    """
    await journal_disk.make_folder(FOLDER)
    mark = await _mark(ledger_disk, storage)
    replay = Replay(journal_disk, mark)
    async for records in replay.records():
        for record in records:
            await _apply(record, storage)
    _judge(replay, storage)
    await storage.flush()
    known = [replay.end.file_id, *replay.file_ids]
    journal = await Journal.open(journal_disk, config, max(known) + 1, replay.end)
    await storage.attach(journal, sorted({s.position.file_id for s in replay.damage}))
    return journal


async def _mark(ledger_disk: Disk, storage: LedgerStorage) -> Position | None:
    """The checkpoint. A damaged one means replaying every segment there is, which is harmless.

    The index carries the state of EVERY_LEDGER from a node's first start on: a checkpoint
    without it means that the index was lost, and nothing is known of any ledger.
    """
    had_mark = True
    mark: Position | None = None
    try:
        mark = await checkpoint.read(ledger_disk)
        had_mark = mark is not None
    except checkpoint.BadCheckpoint as error:
        _log.error("%s; the whole journal is replayed", error)
    if storage.state(EVERY_LEDGER) is None:
        if had_mark:
            _log.error("the entry index is empty although there is a checkpoint")
        storage.set_state(LedgerState(EVERY_LEDGER, limbo=had_mark))
    return mark


async def _apply(record: Record, storage: LedgerStorage) -> None:
    state = storage.state(record.ledger_id)
    if record.kind is Kind.LEDGER:
        storage.set_state(_merged(decode_ledger_state(bytes(record.body)), state))
        return
    if record.kind is Kind.SEAL:
        return
    if state is None:  # its ledger record is among what is damaged
        state = LedgerState(record.ledger_id, limbo=True, met=False)
        storage.set_state(state)
    if record.kind is Kind.FENCE:
        storage.set_state(replace(state, fenced=True))
    elif record.kind is Kind.LAC:
        lac = max(state.explicit_lac, record.entry_id)
        storage.set_state(replace(state, explicit_lac=lac))
    else:
        if not storage.has_room(len(record.body)):
            await storage.flush()
        storage.put(record.ledger_id, record.entry_id, record.body)


def _merged(logged: LedgerState, stored: LedgerState | None) -> LedgerState:
    """A ledger record is of first contact or of a burial; what is known already may be of later,
    and nothing that was ever set is taken back."""
    if stored is None:
        return logged
    return replace(
        logged,
        fenced=logged.fenced or stored.fenced,
        explicit_lac=max(logged.explicit_lac, stored.explicit_lac),
        limbo=logged.limbo or stored.limbo,
        deleted=logged.deleted or stored.deleted,
    )


def _judge(replay: Replay, storage: LedgerStorage) -> None:
    for torn in replay.torn:
        _log.warning("journal: a torn write at %s is cut: %s", torn.position, torn.why)
    for suspect in replay.damage:
        _log.error("journal: damage at %s: %s", suspect.position, suspect.why)
        _put_in_limbo(suspect, storage)


def _put_in_limbo(suspect: Suspect, storage: LedgerStorage) -> None:
    if suspect.ledger_id is None:
        storage.set_state(LedgerState(EVERY_LEDGER, limbo=True))
        return
    state = storage.state(suspect.ledger_id) or LedgerState(suspect.ledger_id, met=False)
    fenced = state.fenced or suspect.kind is not Kind.ENTRY
    storage.set_state(replace(state, limbo=True, fenced=fenced))
