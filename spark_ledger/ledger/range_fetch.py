"""Fetch a range of entries of one fragment from its bookies, replica after replica.

Always true: of one entry no two replicas are asked at a time, and after `fill` either the entry
is there, or an answer stopped before it (ask again from there), or every member of its write set
was asked and has refused (`Refusals` says why). Ranges are striped over the ensemble: one after
the other begins at the next slot; bookies that lately did not answer come last.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bookie_server.api.entry import Entry
from bookie_server.api.messages import ReadResponse
from bookie_server.api.status import Status
from spark_ledger.ledger.answers import judge
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.quorum import Quorum

# entry id -> bookie -> why it did not deliver
Refusals = dict[int, dict[str, str]]


@dataclass(slots=True)
class Chunk:
    """A range to fetch, and what of it is there. `version` is that of the record which names the
    ensemble; `reached` the last entry that was asked for with every answer going that far."""

    first: int
    last: int
    ensemble: tuple[str, ...]
    version: int
    entries: dict[int, Entry] = field(default_factory=dict)
    reached: int = -1

    def cut_short(self, entry_id: int) -> bool:
        """Whether the entry is missing only because answers stopped before it."""
        return self.reached < entry_id <= self.last


class RangeFetch:
    """Fills chunks of one ledger; `heard` takes every last add confirmed that answers carry."""

    def __init__(
        self,
        cluster: Cluster,
        quorum: Quorum,
        ledger_id: int,
        token: bytes,
        heard: Callable[[int], None],
    ) -> None:
        self._cluster = cluster
        self._quorum = quorum
        self._ledger_id = ledger_id
        self._token = token
        self._heard = heard
        self._turn = 0

    async def fill(self, chunk: Chunk, first: int | None = None) -> Refusals:
        """Fetch what is missing of the chunk, from `first` on (None: its beginning)."""
        begin = chunk.first if first is None else first
        refusals: Refusals = {}
        chunk.reached = chunk.last
        for offset in self._offsets(chunk):
            missing = [e for e in range(begin, chunk.reached + 1) if e not in chunk.entries]
            if not missing:
                break
            await self._ask_cover(chunk, offset, missing[0], refusals)
        return refusals

    def _offsets(self, chunk: Chunk) -> list[int]:
        """With which slot each of the Qw rounds begins; the most promising round first."""
        self._turn += 1
        doubtful = self._cluster.bookies.quarantine.suspects()
        rounds = [(self._turn + i) % self._quorum.ensemble_size for i in range(self._rounds())]

        def doubts(offset: int) -> int:
            return sum(chunk.ensemble[s] in doubtful for s in self._quorum.cover(offset))

        return sorted(rounds, key=doubts)

    def _rounds(self) -> int:
        """So many rounds that every member of every write set is asked once."""
        striped = self._quorum.ensemble_size % self._quorum.write_quorum != 0
        return self._quorum.ensemble_size if striped else self._quorum.write_quorum

    async def _ask_cover(self, chunk: Chunk, offset: int, first: int, refusals: Refusals) -> None:
        """Ask as few bookies as hold a copy of every entry, and sort their answers in."""
        slots = self._quorum.cover(offset)
        last = chunk.reached
        responses = await asyncio.gather(
            *(
                self._cluster.bookies.read(
                    *(chunk.ensemble[slot], self._ledger_id, first, last),
                    max_bytes=self._cluster.config.read_request_bytes,
                    token=self._token,
                )
                for slot in slots
            )
        )
        for slot, response in zip(slots, responses, strict=True):
            if response.status is Status.OK:
                self._heard(response.last_add_confirmed)
            self._sort_in(chunk, slot, response, first, last, refusals)

    def _sort_in(
        self,
        chunk: Chunk,
        slot: int,
        response: ReadResponse,
        first: int,
        last: int,
        refusals: Refusals,
    ) -> None:
        bookie = chunk.ensemble[slot]
        for entry_id in range(first, last + 1):
            if slot not in self._quorum.write_set(entry_id) or entry_id in chunk.entries:
                continue
            said = judge(response, self._ledger_id, first, entry_id)
            if said is None:
                if entry_id > first:
                    chunk.reached = min(chunk.reached, entry_id - 1)
                    return
                refusals.setdefault(entry_id, {})[bookie] = "an empty answer"
            elif isinstance(said[1], Entry):
                chunk.entries[entry_id] = said[1]
            else:
                refusals.setdefault(entry_id, {})[bookie] = said[1]
