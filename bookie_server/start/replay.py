"""At start: journal records beyond the checkpoint go to the stores, and damage is judged.

Always true:
- every whole record is applied, also those of a torn batch: to apply a record that was never
  acknowledged is allowed, to forget one that was is not; applying a record twice changes nothing;
- unreadable bytes beyond the last position that is surely synced are a torn write, or damage of the
  last write, which looks the same: they are cut and the node serves. If the bytes name their
  ledger, it gets torn limbo of its own, open or closed; and every ledger is in torn limbo until
  limbo.py has found the ledgers concerned;
- unreadable bytes below that position are damage. If they name their ledger, it is put in limbo
  (and fenced, unless the record was an entry: it may have been a fence); else every ledger is put
  in limbo, and the node is read-only. Limbo is durable before the checkpoint moves past the damage;
- a journal that an earlier start missed is replayed after all others (LateReplayed), and direct
  logs after all journals (replayed.py).
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
from bookie_server.start.replayed import (
    LateReplayed,
    Replayed,
    doubt,
    doubt_all,
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

    The checkpoint is at the new segments' start when this returns. `space`: the monitor that shows
    which ledger directories have space for new ledgers. Raises DiskFailed.
    """
    storage, marks = await LedgerStorage.open(directories, config, space)
    lost = _lost_before_replay(directories, storage, marks)
    replayed, late = Replayed(storage), LateReplayed(storage)
    try:
        endings = await _replay_all(directories, marks, replayed, lost)
        endings.update(await _replay_late(directories, marks, late))
    finally:
        replayed.cancel()
        late.cancel()
    if marks is None:
        lost += _lost_without_checkpoint(endings, replayed)
    for end in endings.values():  # after all replays: earlier records must not undo these changes
        _judge(end.replay, storage)
    for why in lost:
        doubt_all(storage, LimboReason.LOST, why)
    try:
        await replay_direct_logs(storage, replayed)
        await replayed.end()
    finally:
        replayed.cancel()
    while storage.is_flushing or storage.has_unflushed:  # the loss of a directory leaves more
        await storage.flush()
    await storage.forget_replayed_logs()
    await _begin(directories, endings, config, storage)
    return storage


async def _replay_all(
    directories: Directories, marks: Marks | None, replayed: Replayed, lost: list[str]
) -> dict[str, "_End"]:
    """How each journal ended, without those that are back after a start that missed them. If one of
    several cannot be read, the reason is added to `lost`."""
    endings: dict[str, _End] = {}
    for directory in directories.journals:
        mark = (marks or {}).get(directory.id)
        try:
            if mark is not None and await _is_back(directory.disk, mark):
                continue
            if mark is None and marks and await segment_ids(directory.disk):
                mark = JournalMark(_FIRST)  # it came and was used since: it has to be complete
            endings[directory.id] = await _replay(directory.disk, mark, replayed)
        except DiskFailed as error:
            if len(directories.journals) == 1:
                raise
            lost.append(f"journal directory {directory.name} cannot be read: {error}")
    await replayed.end()
    return endings


async def _replay_late(
    directories: Directories, marks: Marks | None, late: LateReplayed
) -> dict[str, "_End"]:
    """How each journal ended that an earlier start missed. A journal that cannot be read stays
    missed; the earlier start logged the possible loss."""
    endings: dict[str, _End] = {}
    for directory in directories.journals:
        mark = (marks or {}).get(directory.id)
        try:
            if mark is not None and await _is_back(directory.disk, mark):
                text = "journal directory %s was missing at an earlier start and is back"
                _log.error(text, directory.name)
                end = await _replay(directory.disk, mark, late)
                for suspect in end.replay.damage if end.replay is not None else ():
                    _log.error("journal: damage at %s: %s", suspect.position, suspect.why)
                endings[directory.id] = end._replace(replay=None)  # it is not judged
        except DiskFailed as error:
            if len(directories.journals) == 1:
                raise
            _log.error("journal directory %s cannot be read: %s", directory.name, error)
    await late.end()
    return endings


async def _is_back(disk: Disk, mark: JournalMark) -> bool:
    """Whether this is the journal that a start missed, unchanged. Raises DiskFailed."""
    return mark.missed and not _was_used_since(mark, await segment_ids(disk))


async def _begin(
    directories: Directories,
    endings: Mapping[str, "_End"],
    config: StorageConfig,
    storage: LedgerStorage,
) -> None:
    """Begin new segments in all directories that can be written. The records of the others are
    flushed by now. Raises DiskFailed when no directory can be written."""
    journals: dict[str, Journal] = {}
    failures: dict[str, str] = {}
    for directory in directories.journals:
        end = endings.get(directory.id)
        try:
            if end is None:
                raise DiskFailed("it could not be read at the start")
            opened = Journal.open(directory.disk, config, end.file_id, end.synced)
            journals[directory.id] = await opened
        except DiskFailed as error:
            failures[directory.id] = str(error)
            _log.error("journal directory %s is left out: %s", directory.name, error)
    if not journals:
        raise DiskFailed(f"no journal directory can be written: {failures}")
    await storage.attach(journals, failures, {i: end.damaged for i, end in endings.items()})


class _End(NamedTuple):
    """How a replayed journal ended: the segment with which it goes on, up to where it is durable,
    and the segments to set aside."""

    file_id: int
    synced: Position
    damaged: list[int]
    replay: Replay | None


def _lost_before_replay(
    directories: Directories, storage: LedgerStorage, marks: Marks | None
) -> list[str]:
    """Why, by checkpoint and index, any ledger may have lost entries.

    The index has the state of EVERY_LEDGER from a node's first start on: a checkpoint without it
    means that the index was lost with the states of all ledgers. With a missing journal that the
    checkpoint names and does not mark as retired, the last acknowledged entries may be lost.
    """
    lost = []
    if storage.state(EVERY_LEDGER) is None:
        storage.set_state(LedgerState(EVERY_LEDGER))
        if marks is not None or any(store.logs.sealed() for store in storage.stores):
            lost.append("the entry index is empty although there is a checkpoint or a log")
        elif storage.failures:
            lost.append("no ledger directory that is left has the state of any ledger")
    present = [directory.id for directory in directories.journals]
    for journal_id, mark in (marks or {}).items():
        if journal_id not in present and not mark.retired:
            lost.append(f"journal directory {journal_id} is missing")
    return lost


def _lost_without_checkpoint(endings: Mapping[str, "_End"], replayed: Replayed) -> list[str]:
    """Why the journals may lack acknowledged entries. No segment is removed before a checkpoint is
    in every ledger directory: without a checkpoint this is a first start, or those directories are
    missing, and the present ones were formatted by a start that never got so far."""
    lost = []
    for journal_id, end in endings.items():
        file_ids = end.replay.file_ids if end.replay is not None else []
        if file_ids and file_ids[0] != _FIRST.file_id:
            lost.append(f"there is no checkpoint, and journal {journal_id} lacks its beginning")
        elif not file_ids and replayed.ledgers:
            lost.append(f"there is no checkpoint, and journal {journal_id} is empty, others not")
    return lost


async def _replay(disk: Disk, mark: JournalMark | None, replayed: Replayed) -> _End:
    """Raises DiskFailed."""
    await disk.make_folder(FOLDER)
    there = await segment_ids(disk)
    if mark is not None and mark.retired and not (mark.missed or _was_used_since(mark, there)):
        newest = max([mark.position.file_id, *there])
        _log.info("journal: 0 records replayed")
        return _End(newest + 1, mark.position, [], None)
    replay = Replay(disk, mark.position if mark is not None else None)
    count = 0
    async for records in replay.records():
        await replayed.apply(records)
        count += len(records) - (bool(records) and records[-1].kind is RecordKind.SEAL)
    _log.info("journal: %d records replayed", count)
    newest = max([replay.end.file_id, *replay.file_ids])
    damaged = sorted({suspect.position.file_id for suspect in replay.damage})
    return _End(newest + 1, replay.end, damaged, replay)


def _was_used_since(mark: JournalMark, there: list[int]) -> bool:
    """Whether the journal was used after the mark. A journal that is closed or given up keeps the
    segment in which that happened, until a later run begins new ones: without that segment, the
    mark is of a directory that was away since."""
    return bool(there) and mark.position.file_id not in there


def _judge(replay: Replay | None, storage: LedgerStorage) -> None:
    """Put the ledgers of torn and damaged records in limbo. A torn record may have been
    acknowledged, as damage looks the same."""
    if replay is None:
        return
    for torn in replay.torn:
        _log.warning("journal: a torn write at %s is cut: %s", torn.position, torn.why)
        state = None if torn.ledger_id is None else storage.state(torn.ledger_id)
        if torn.ledger_id is not None and not (state and state.deleted):
            fence = torn.kind is RecordKind.FENCE
            doubt(storage, torn.ledger_id, LimboReason.TORN, fence=fence)
    for suspect in replay.damage:
        _log.error("journal: damage at %s: %s", suspect.position, suspect.why)
        if suspect.ledger_id is None:
            doubt(storage, EVERY_LEDGER, LimboReason.LOST)
        else:
            fence = suspect.kind is not RecordKind.ENTRY
            doubt(storage, suspect.ledger_id, LimboReason.LOST, fence=fence)
    doubt_the_tail(replay.ending, storage)


def doubt_the_tail(ending: Ending, storage: LedgerStorage) -> None:
    """Put the ledgers in limbo that the end of the last run leaves in doubt. A torn tail may be
    damage of the last acknowledged records, of any ledger. Without a seal, page-cache ledgers may
    lack their last entries, unless they are fenced: a fence is synced with all earlier writes."""
    if ending is Ending.TORN:
        doubt(storage, EVERY_LEDGER, LimboReason.TORN)
    if ending is not Ending.CLEAN:
        for state in storage.states():
            if state.durability == "page-cache" and not state.fenced and not state.limbo:
                doubt(storage, state.ledger_id, LimboReason.TORN)
