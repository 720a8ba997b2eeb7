"""At start: journal records beyond the checkpoint go to the stores, and damage is judged.

Always true:
- every whole record is applied, also the whole records of a torn batch: the start may apply a
  record that was never acknowledged, but must not lose an acknowledged record. To apply a record
  twice changes nothing;
- a missing entry of a ledger in *limbo* counts as unknown, not as absent;
- the *synced position* is the last position that is surely synced. Unreadable bytes beyond it are a
  torn write, or damage of the last write: the two look alike. These bytes are cut off and the node
  serves. If the ledger id among the bytes can be read, that ledger is put in torn limbo, whether it
  is open or closed. In any case every ledger is in torn limbo until ledgers/limbo.py has found
  the ledgers concerned;
- unreadable bytes below the synced position are damage. If the ledger id among them can be read,
  that ledger is put in limbo; it is also fenced, unless the record was surely an entry, as the lost
  record may have been a fence. If no ledger id can be read, every ledger is put in limbo, and the
  node is read-only. Limbo is durable before the checkpoint moves past the damage;
- a journal that an earlier start missed is replayed after all others (LateRecordApplier), and
  direct logs after all journals (applier.py).
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from bookie_server.config import StorageConfig
from bookie_server.disk.interface import Disk, DiskFailed
from bookie_server.disk.monitor import DiskMonitor
from bookie_server.journal.checkpoint import JournalMark, Marks
from bookie_server.journal.format import Position, RecordKind
from bookie_server.journal.scan import Ending, Replay
from bookie_server.journal.writer import FOLDER, Journal, segment_ids
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, LimboReason
from bookie_server.start.applier import (
    LateRecordApplier,
    RecordApplier,
    put_all_in_limbo,
    put_in_limbo,
    replay_direct_logs,
)
from bookie_server.storage.directories import Directories
from bookie_server.storage.storage import LedgerStorage

_FIRST = Position(1, 0)
_log = logging.getLogger(__name__)


async def open_storage(
    directories: Directories, config: StorageConfig, space: DiskMonitor | None = None
) -> LedgerStorage:
    """Replay the journals' records beyond the checkpoint, flush them, begin new segments.

    When this returns, the checkpoint's marks are the starts of the new segments. `space`: the
    monitor that shows which ledger directories have space for new ledgers. Raises DiskFailed.
    """
    storage, marks = await LedgerStorage.open(directories, config, space)
    losses = _losses_before_replay(directories, storage, marks)
    applier, late_applier = RecordApplier(storage), LateRecordApplier(storage)
    try:
        replayed = await _replay_all(directories, marks, applier, losses)
        replayed.update(await _replay_late(directories, marks, late_applier))
    finally:
        applier.cancel()
        late_applier.cancel()
    if marks is None:
        losses += _losses_without_checkpoint(replayed, applier)
    for journal in replayed.values():  # after all replays, so that no record undoes these changes
        _judge(journal.replay, storage)
    for why in losses:
        put_all_in_limbo(storage, LimboReason.LOST, why)
    try:
        await replay_direct_logs(storage, applier)
        await applier.end()
    finally:
        applier.cancel()
    while storage.is_flushing or storage.has_unflushed:  # again if a directory failed in a flush
        await storage.flush()
    await storage.forget_replayed_logs()
    await _begin_segments(directories, replayed, config, storage)
    return storage


async def _replay_all(
    directories: Directories, marks: Marks | None, applier: RecordApplier, losses: list[str]
) -> dict[str, "_ReplayedJournal"]:
    """Replay each journal, except journals that an earlier start missed (`_replay_late`). The
    result is by directory id. If a journal cannot be read and there are other journals, the reason
    is added to `losses`."""
    replayed: dict[str, _ReplayedJournal] = {}
    for directory in directories.journals:
        mark = (marks or {}).get(directory.id)
        try:
            if mark is not None and await _is_back(directory.disk, mark):
                continue
            if mark is None and marks and await segment_ids(directory.disk):
                mark = JournalMark(_FIRST)  # a new journal: none of its segments may be missing
            replayed[directory.id] = await _replay(directory.disk, mark, applier)
        except DiskFailed as error:
            if len(directories.journals) == 1:
                raise
            losses.append(f"journal directory {directory.name} cannot be read: {error}")
    await applier.end()
    return replayed


async def _replay_late(
    directories: Directories, marks: Marks | None, late_applier: LateRecordApplier
) -> dict[str, "_ReplayedJournal"]:
    """Replay the journals that an earlier start missed; the result is by directory id. A journal
    that cannot be read stays missed; the earlier start logged the possible loss."""
    replayed: dict[str, _ReplayedJournal] = {}
    for directory in directories.journals:
        mark = (marks or {}).get(directory.id)
        try:
            if mark is not None and await _is_back(directory.disk, mark):
                text = "journal directory %s was missing at an earlier start and is back"
                _log.error(text, directory.name)
                journal = await _replay(directory.disk, mark, late_applier)
                for unreadable in journal.replay.damage if journal.replay is not None else ():
                    _log.error("journal: damage at %s: %s", unreadable.position, unreadable.why)
                replayed[directory.id] = journal._replace(replay=None)  # the damage is not judged
        except DiskFailed as error:
            if len(directories.journals) == 1:
                raise
            _log.error("journal directory %s cannot be read: %s", directory.name, error)
    await late_applier.end()
    return replayed


async def _is_back(disk: Disk, mark: JournalMark) -> bool:
    """Whether this is the journal that a start missed, unchanged. Raises DiskFailed."""
    return mark.missed and not _was_used_since(mark, await segment_ids(disk))


async def _begin_segments(
    directories: Directories,
    replayed: Mapping[str, "_ReplayedJournal"],
    config: StorageConfig,
    storage: LedgerStorage,
) -> None:
    """Begin new segments in all directories that can be written. The records of the other
    directories are flushed already. Raises DiskFailed when no directory can be written."""
    journals: dict[str, Journal] = {}
    failures: dict[str, str] = {}
    for directory in directories.journals:
        earlier = replayed.get(directory.id)
        try:
            if earlier is None:
                raise DiskFailed("it could not be read at the start")
            opened = Journal.open(directory.disk, config, earlier.next_segment, earlier.synced)
            journals[directory.id] = await opened
        except DiskFailed as error:
            failures[directory.id] = str(error)
            _log.error("journal directory %s is left out: %s", directory.name, error)
    if not journals:
        raise DiskFailed(f"no journal directory can be written: {failures}")
    damaged_ids = {directory_id: journal.damaged_ids for directory_id, journal in replayed.items()}
    await storage.attach(journals, failures, damaged_ids)


class _ReplayedJournal(NamedTuple):
    """The result of a journal's replay. `next_segment`: the id of the segment that this run begins.
    `synced`: all records before this position are durable. `damaged_ids`: the ids of segments with
    damage, which are kept under another name. `replay`: None if there is nothing to judge."""

    next_segment: int
    synced: Position
    damaged_ids: list[int]
    replay: Replay | None


def _losses_before_replay(
    directories: Directories, storage: LedgerStorage, marks: Marks | None
) -> list[str]:
    """The reasons, from checkpoint and index, why acknowledged entries of any ledger may be lost.

    The index has the state of EVERY_LEDGER from a node's first start on. If there is a checkpoint
    and no such state, the index was lost with the states of all ledgers. If a journal of the
    checkpoint is missing and is not retired (no longer needed), its last entries may be lost.
    """
    losses = []
    if storage.state(EVERY_LEDGER) is None:
        storage.set_state(LedgerState(EVERY_LEDGER))
        if marks is not None or any(store.logs.sealed_ids() for store in storage.stores):
            losses.append("the entry index is empty although there is a checkpoint or a log")
        elif storage.failures:
            losses.append("the ledger directories that can be used have no state of any ledger")
    present = [directory.id for directory in directories.journals]
    for journal_id, mark in (marks or {}).items():
        if journal_id not in present and not mark.retired:
            losses.append(f"journal directory {journal_id} is missing")
    return losses


def _losses_without_checkpoint(
    replayed: Mapping[str, "_ReplayedJournal"], applier: RecordApplier
) -> list[str]:
    """The reasons why the journals may lack acknowledged entries. A segment is removed only after a
    checkpoint is in every ledger directory. So without a checkpoint either this is a first start,
    or the directories with the checkpoint are missing: then an earlier start formatted the present
    directories, and stopped before it wrote a checkpoint."""
    losses = []
    for journal_id, journal in replayed.items():
        file_ids = journal.replay.file_ids if journal.replay is not None else []
        if file_ids and file_ids[0] != _FIRST.file_id:
            losses.append(f"there is no checkpoint, and journal {journal_id} lacks its beginning")
        elif not file_ids and applier.ledgers:
            text = f"there is no checkpoint, journal {journal_id} is empty and another is not"
            losses.append(text)
    return losses


async def _replay(disk: Disk, mark: JournalMark | None, applier: RecordApplier) -> _ReplayedJournal:
    """Raises DiskFailed."""
    await disk.make_folder(FOLDER)
    present = await segment_ids(disk)
    if mark is not None and mark.retired and not (mark.missed or _was_used_since(mark, present)):
        newest = max([mark.position.file_id, *present])
        _log.info("journal: 0 records replayed")
        return _ReplayedJournal(newest + 1, mark.position, [], None)
    replay = Replay(disk, mark.position if mark is not None else None)
    count = 0
    async for records in replay.records():
        await applier.apply(records)
        count += len(records) - (bool(records) and records[-1].kind is RecordKind.SEAL)
    _log.info("journal: %d records replayed", count)
    newest = max([replay.end.file_id, *replay.file_ids])
    damaged_ids = sorted({unreadable.position.file_id for unreadable in replay.damage})
    return _ReplayedJournal(newest + 1, replay.end, damaged_ids, replay)


def _was_used_since(mark: JournalMark, present: list[int]) -> bool:
    """Whether the journal was used after the mark; `present` are the ids of its segments. When a
    journal is closed or given up, its last segment stays until a later run of the node begins new
    segments. So if the mark's segment is missing, a later run wrote to this journal, and the mark
    comes from a directory that was missing in that run."""
    return bool(present) and mark.position.file_id not in present


def _judge(replay: Replay | None, storage: LedgerStorage) -> None:
    """Put the ledgers of torn and damaged records in limbo. A torn record may be an acknowledged
    record that was damaged: the two look alike."""
    if replay is None:
        return
    for unreadable in replay.torn_writes:
        _log.warning("journal: a torn write at %s is cut: %s", unreadable.position, unreadable.why)
        state = None if unreadable.ledger_id is None else storage.state(unreadable.ledger_id)
        if unreadable.ledger_id is not None and not (state and state.deleted):
            fence = unreadable.kind is RecordKind.FENCE
            put_in_limbo(storage, unreadable.ledger_id, LimboReason.TORN, fence=fence)
    for unreadable in replay.damage:
        _log.error("journal: damage at %s: %s", unreadable.position, unreadable.why)
        if unreadable.ledger_id is None:
            put_in_limbo(storage, EVERY_LEDGER, LimboReason.LOST)
        else:
            fence = unreadable.kind is not RecordKind.ENTRY
            put_in_limbo(storage, unreadable.ledger_id, LimboReason.LOST, fence=fence)
    judge_ending(replay.ending, storage)


def judge_ending(ending: Ending, storage: LedgerStorage) -> None:
    """Put in limbo the ledgers that may have lost entries when the last run ended. Torn bytes at
    the end may be damaged acknowledged records of any ledger. If the journal has no seal,
    page-cache ledgers (their entries are acknowledged before the sync) may lack their last entries,
    unless they are fenced: a fence is synced with all earlier writes."""
    if ending is Ending.TORN:
        put_in_limbo(storage, EVERY_LEDGER, LimboReason.TORN)
    if ending is not Ending.CLEAN:
        for state in storage.states():
            if state.durability == "page-cache" and not state.fenced and not state.limbo:
                put_in_limbo(storage, state.ledger_id, LimboReason.TORN)
