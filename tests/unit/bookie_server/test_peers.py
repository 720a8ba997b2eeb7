"""Whether other bookies have what the record says they have."""

from bookie_server.api.messages import StoredResponse, spans_of
from bookie_server.api.status import Status
from bookie_server.ledgers.peers import Peers
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState
from tests.simulation.loop import run


def test_only_the_entries_of_its_write_sets_are_asked_of_a_bookie():
    """Of three bookies each has two thirds of the entries."""
    fragments = (Fragment(0, ("a", "b", "c")),)
    closed = LedgerRecord(
        *(7, 3, 2, 2, fragments),
        state=RecordState.CLOSED,
        last_entry=8,
        length_bytes=1,
        rows=9,
    )
    kept = {"a": (0, 2, 3, 5, 6, 8), "b": (0, 1, 3, 4, 6, 7), "c": (1, 2, 4, 5, 7, 8)}

    async def ask(request):
        return StoredResponse(Status.OK, 8, spans_of(kept[request.bookie_id]))

    async def main():
        assert await Peers(ask, b"").have_all(closed)
        kept["c"] = kept["c"][:-1]
        assert not await Peers(ask, b"").have_all(closed)

    run(main())
