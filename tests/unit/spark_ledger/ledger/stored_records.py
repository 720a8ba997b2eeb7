"""Records of ledgers in a store whose answers are scripted."""

import itertools
from collections import deque

from spark_ledger.ledger import transitions as t
from spark_ledger.ledger.records import (
    LedgerRecords,
)
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState
from spark_ledger.metadata.store import OutcomeUnknown, StoreUnavailable
from tests.simulation.store import SimStore

ABC = ("a", "b", "c")


END = t.LastEntry(4, 50, 5)


APPLIED, LOST, OK, GONE = "applied", "lost", "ok", "store gone"


class Scripted:
    """A session whose next writes end as the script says: `applied` and `lost` are both of an
    unknown outcome; `then` runs after an applied one, before anybody reads. After `store gone`
    nothing is answered any more."""

    def __init__(self, session, *script, then=None):
        self._session = session
        self._script = deque(script)
        self._then = then
        self.sent = 0
        self.gone = False

    def __getattr__(self, name):
        return getattr(self._session, name)

    async def get(self, *args):
        return await self._read(self._session.get, *args)

    async def sync(self, *args):
        return await self._read(self._session.sync, *args)

    async def create(self, *args, **options):
        return await self.write(self._session.create, *args, **options)

    async def set(self, *args):
        return await self.write(self._session.set, *args)

    async def delete(self, *args):
        return await self.write(self._session.delete, *args)

    async def multi(self, *args):
        return await self.write(self._session.multi, *args)

    async def _read(self, call, *args):
        if self.gone:
            raise StoreUnavailable("nobody answers")
        return await call(*args)

    async def write(self, call, *args, **options):
        fate = self._script.popleft() if self._script else OK
        self.sent += 1
        if self.gone:
            raise StoreUnavailable("nobody answers")
        if fate is GONE:
            self.gone = True
            raise OutcomeUnknown("lost")
        if fate is LOST:
            raise OutcomeUnknown("lost")
        result = await call(*args, **options)
        if fate is APPLIED:
            if self._then is not None:
                await self._then()
            raise OutcomeUnknown("lost")
        return result


def record_of(ledger_id=7, state=RecordState.OPEN, **fields):
    whole = (Fragment(0, ABC),)
    return LedgerRecord(ledger_id, 3, 3, 2, whole, state, creator="mine", **fields)


def closed_of(ledger_id=7):
    return record_of(ledger_id, RecordState.CLOSED, last_entry=4, length_bytes=50, rows=5)


async def stored(record=None):
    """A store with the record in it, an undisturbed view of it, and the record as known."""
    store = SimStore()
    await store.session("founder").create(paths.LEDGERS)
    records = LedgerRecords(store.session("admin"))
    known = await records.create(record or record_of())
    return store, records, known


def flaky(store, *script, then=None):
    return LedgerRecords(Scripted(store.session("flaky"), *script, then=then))


CHANGE = (
    record_of(),
    lambda record: t.change_ensemble(record, {1: "b"}, {1: "d"}, 5),
    lambda record: record.fragments[-1] == Fragment(5, ("a", "d", "c")),
)


CLOSE = (record_of(), lambda record: t.close(record, END), lambda record: t.end_of(record) == END)


MARK = (
    record_of(),
    t.mark_in_recovery,
    lambda record: record.state is RecordState.IN_RECOVERY,
)


NAMES = ["change", "close", "mark in recovery", "close recovered"]


UNKNOWN = [fates for count in (1, 2) for fates in itertools.product((APPLIED, LOST), repeat=count)]
