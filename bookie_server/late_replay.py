"""A journal that was missing at an earlier start is back: what nobody else here has is taken.

Always true:
- all that it says is older than the start that missed it, which put every ledger in doubt; so it
  takes nothing back and replaces nothing: entries that are here stay as they are, and so does the
  limbo of a ledger that is known, which may have been repaired since;
- what was set for good (fence, tombstone, explicit LAC) counts;
- a ledger that it alone knows was forgotten meanwhile, or never told of elsewhere: it is fenced and
  in limbo "lost", as one that a ledger directory brings back;
- of a deleted ledger no entry comes back;
- what is damaged or torn in it adds no doubt: that the whole of it may be lost was said before.
"""

from dataclasses import replace

from bookie_server.api.entry import Buffer
from bookie_server.entry_index import EVERY_LEDGER, LedgerState, decode_ledger_state, merged
from bookie_server.journal_format import Kind, Record
from bookie_server.ledger_states import doubted
from bookie_server.replayed import Replayed


class LateReplayed(Replayed):
    """Applies the records of journals that were away, after those of all others."""

    async def apply(self, records: list[Record]) -> None:
        """See Replayed.apply."""
        await super().apply([each for each in records if each.ledger_id != EVERY_LEDGER])

    def _known(self, ledger_id: int) -> LedgerState:
        state = self._storage.state(ledger_id)
        if state is None:
            state = doubted(LedgerState(ledger_id, met=False))
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        if record.kind is not Kind.LEDGER:
            super()._apply_state(record)
            return
        known = self._storage.state(record.ledger_id)
        logged = decode_ledger_state(bytes(record.body))
        if known is None:
            self._storage.restore_state(doubted(logged))
        else:
            both = merged(known, replace(logged, revision=0))
            self._storage.restore_state(replace(both, limbo=known.limbo))

    async def _put(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        if self._known(ledger_id).deleted:
            return
        here = await self._storage.stored(ledger_id, min(entries), max(entries))
        absent = {i: entry for i, entry in entries.items() if i not in here}
        if absent:
            await super()._put(ledger_id, absent)
