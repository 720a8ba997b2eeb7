"""Rebuilds an entry index from the entry logs: `python -m bookie_server --rebuild-index`.

For a directory whose index is lost or damaged, while no bookie runs on it (the caller holds its
lock). Always true:
- the new index is written beside the old index; when the new index is complete and durable, a
  rename puts it in the old index's place;
- a marker file exists from the first step to the last, and no bookie starts on a directory that has
  the marker (`refuse_half_rebuilt`): after any interruption the command can be given again;
- of two copies of an entry the copy in the newer log counts;
- an entry with a damaged record cannot be delivered; it never counts as absent. Damage in bytes
  that name no ledger puts every ledger in limbo.

The entry logs do not have the ledgers' states (fenced, deleted ...). The states come from another
directory's index. If there is no such index, every ledger is in limbo, and the ledgers with entries
in the logs are fenced, so that their writers do not go on.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bookie_server.config import StorageConfig
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull, NoSuchFile
from bookie_server.logs.entry_log import FOLDER, MAP, EntryLogs
from bookie_server.logs.index import (
    EVERY_LEDGER,
    EntryIndex,
    LedgerState,
    LimboReason,
    merge_by_revision,
)
from bookie_server.logs.scan import LogMap, Scanned, read_map, scan

MARKER = "index-rebuild"
INDEX, NEW, OLD = "index", "index.new", "index.damaged"
_LATEST = 1 << 32  # above all revisions in journals, so a replay keeps the rebuilt states
_log = logging.getLogger(__name__)

MakeIndex = Callable[[str], Awaitable[EntryIndex]]
"""Opens the index in a folder of the directory. The folder is empty or absent."""


@dataclass(slots=True)
class RebuildOutcome:
    """The result of a rebuild: the numbers of logs, entries and damaged records, and the ids of the
    ledgers with entries. `incomplete_ids`: the ledgers that lack a record. `may_lack_more`: any
    ledger may lack records, or the ledgers' states are unknown."""

    logs: int = 0
    entries: int = 0
    damaged: int = 0
    ledger_ids: dict[int, None] = field(default_factory=dict)
    incomplete_ids: dict[int, None] = field(default_factory=dict)
    may_lack_more: bool = False

    def sentence(self) -> str:
        """The outcome as a sentence for an operator."""
        summary = (
            f"the index was made anew: {self.entries} entries of {len(self.ledger_ids)} ledgers in"
            f" {self.logs} entry logs, {self.damaged} damaged records"
        )
        if self.may_lack_more:
            return (
                f"{summary}; every ledger is in limbo until it was compared with its copies on"
                " other bookies"
            )
        if self.incomplete_ids:
            return f"{summary}; {len(self.incomplete_ids)} ledgers lack entries and are in limbo"
        return summary


async def refuse_half_rebuilt(disk: Disk) -> None:
    """Raises DiskFailed when a rebuild of the directory's index was begun and not ended."""
    if MARKER in await disk.list():
        raise DiskFailed("a rebuild of the entry index was interrupted; give --rebuild-index again")


async def rebuild(
    disk: Disk,
    directory_id: str,
    make_index: MakeIndex,
    config: StorageConfig,
    states: Sequence[LedgerState] | None = None,
) -> RebuildOutcome:
    """Make the index of the directory anew; durable when this returns. `directory_id`: empty in an
    early format. `states`: the states in the other directories' indexes, of some ledgers several;
    None: there is no other index.

    Raises DiskFailed; then the operator gives the command again. Raises DiskFull when there is no
    space for the new index: then the directory is unchanged.
    """
    is_repeated = MARKER in await disk.list()
    if not is_repeated:
        await (await disk.create(MARKER)).close()
        await disk.sync_dir()
    try:
        outcome = await _make_beside(disk, directory_id, make_index, config, states)
    except DiskFull as error:
        if is_repeated:
            raise
        await _empty(disk, NEW)
        await disk.remove(MARKER)
        await disk.sync_dir()
        raise DiskFull(
            f"there is no space to make the index anew; the old index is unchanged: {error}"
        ) from error
    await _replace(disk)
    return outcome


async def _make_beside(
    disk: Disk,
    directory_id: str,
    make_index: MakeIndex,
    config: StorageConfig,
    states: Sequence[LedgerState] | None,
) -> RebuildOutcome:
    """Make the new index beside the old one: complete and durable when this returns."""
    await disk.make_folder(FOLDER)
    await _empty(disk, NEW)
    index = await make_index(NEW)
    try:
        logs = await EntryLogs.open(disk, config)
        outcome = await _Rebuild(disk, logs, index, states).run(directory_id)
        await logs.close()
    except DiskFailed:
        with contextlib.suppress(DiskFailed):
            await index.close()
        raise
    await index.close()
    await _forget_maps(disk)
    return outcome


class _Rebuild:
    """Fills an empty index from the entry logs."""

    def __init__(
        self, disk: Disk, logs: EntryLogs, index: EntryIndex, states: Sequence[LedgerState] | None
    ) -> None:
        self._disk = disk
        self._logs = logs
        self._index = index
        self._other_states: dict[int, LedgerState] = {}  # states of other directories' indexes
        for state in states or ():
            other = self._other_states.get(state.ledger_id)
            self._other_states[state.ledger_id] = (
                state if other is None else merge_by_revision(state, other)
            )
        self._outcome = RebuildOutcome(may_lack_more=states is None)

    async def run(self, directory_id: str) -> RebuildOutcome:
        """Fill the index, durably. A copy that a compaction has not finished counts as newer than
        its source. Raises DiskFailed."""
        sources = self._logs.unfinished_copies()  # by id of the copy
        for log_id in sorted([*self._logs.sealed_ids(), *sources, *sources.values()]):
            await self._take_log(log_id)
        await self._index.put_ledgers(self._states(directory_id))
        await self._index.sync()
        return self._outcome

    async def _take_log(self, log_id: int) -> None:
        """Put the records of one log into the index."""
        try:
            file = await self._logs.open_log(log_id)
        except NoSuchFile:  # the source of a copy, removed already
            return
        counts: Counter[int] = Counter()
        has_unnamed_damage = False  # in bytes that name no ledger
        try:
            footer = await read_map(self._logs, self._disk, log_id)
            footer = footer if footer is not None and footer.has_footer else None
            async for chunk in scan(file, log_id, footer.records_end if footer else file.end):
                await self._put_chunk(chunk, counts)
                if any(damage.location is None for damage in chunk.damage):
                    has_unnamed_damage = True
        finally:
            await file.close()
        self._outcome.logs += 1
        self._note_losses(log_id, footer, counts, has_unnamed_damage)
        _log.info(
            "log %d has %d ledgers; entries so far: %d", log_id, len(counts), self._outcome.entries
        )

    async def _put_chunk(self, chunk: Scanned, counts: Counter[int]) -> None:
        locations = [record.location for record in chunk.records]
        damaged = [damage.location for damage in chunk.damage if damage.location is not None]
        counts.update(location.ledger_id for location in (*locations, *damaged))
        self._outcome.ledger_ids.update(dict.fromkeys(counts))
        self._outcome.entries += len(locations)
        self._outcome.damaged += len(chunk.damage)
        deleted_ids = {
            i for i in counts if (state := self._other_states.get(i)) is not None and state.deleted
        }
        await self._index.put([at for at in locations if at.ledger_id not in deleted_ids])
        for location in damaged:  # an older copy is better than a damaged copy
            older = await self._index.get(location.ledger_id, location.entry_id)
            if older is None and location.ledger_id not in deleted_ids:
                await self._index.put([location])

    def _note_losses(
        self,
        log_id: int,
        footer: LogMap | None,
        counts: Mapping[int, int],
        has_unnamed_damage: bool,
    ) -> None:
        """Note the ledgers that lack records by the log's map. If a log without a map has damage
        that names no ledger, any ledger may lack records."""
        if footer is None:
            if has_unnamed_damage:
                _log.error("log %d is damaged or torn and has no map", log_id)
                self._outcome.may_lack_more = True
            return
        for ledger_id, share in footer.shares().items():
            if counts.get(ledger_id, 0) < share.entries:
                _log.error("log %d lacks entries of ledger %d", log_id, ledger_id)
                self._outcome.incomplete_ids[ledger_id] = None
                self._outcome.ledger_ids[ledger_id] = None

    def _states(self, directory_id: str) -> list[LedgerState]:
        """The states that the new index gets: of all ledgers, and of EVERY_LEDGER. `met=False`: the
        ledger's record was not read."""
        outcome, other_states = self._outcome, self._other_states
        every_state = other_states.pop(EVERY_LEDGER, LedgerState(EVERY_LEDGER))
        states = []
        for ledger_id in sorted({**other_states, **outcome.ledger_ids}):
            state = other_states.get(ledger_id)
            if state is None:
                directories = (directory_id,) if directory_id else ()
                state = LedgerState(ledger_id, fenced=True, met=False, directories=directories)
                state = _in_limbo(state)
            elif ledger_id in outcome.incomplete_ids:
                state = _in_limbo(state)
            states.append(state)
        return [*states, _in_limbo(every_state) if outcome.may_lack_more else every_state]


def _in_limbo(state: LedgerState) -> LedgerState:
    revision = max(_LATEST, state.revision + 1)
    return replace(state, limbo=LimboReason.LOST, revision=revision)


async def _empty(disk: Disk, folder: str) -> None:
    for name in await disk.list(folder):
        await disk.remove(f"{folder}/{name}")


async def _forget_maps(disk: Disk) -> None:
    """Remove the map files (a map: how much of each ledger a log has), made with the old index."""
    for name in await disk.list(FOLDER):
        if name.endswith(MAP):
            await disk.remove(f"{FOLDER}/{name}")
    await disk.sync_dir(FOLDER)


async def _replace(disk: Disk) -> None:
    if await disk.list(INDEX):
        await _empty(disk, OLD)
        await disk.rename(INDEX, OLD)
    await disk.rename(NEW, INDEX)
    await disk.sync_dir()
    with contextlib.suppress(NoSuchFile):
        await disk.remove(MARKER)
    await disk.sync_dir()
