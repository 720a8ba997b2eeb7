"""A long range read as one stream from one bookie: no request to wait for between two responses.

Always true:
- what is returned is checked, confirmed by whoever asked for the range, and in order; at whatever
  is not the next entry (damage, denial, BUSY, silence) the stream ends, and its caller goes on in
  the usual way, replica after replica;
- what is under way stays within `ahead_bytes`: credit for one response less is out, for the last
  may exceed it, and more is granted only as entries are taken.
"""

from bookie_server.api.entry import Entry
from bookie_server.api.messages import ReadResponse
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import ReadStream, Silent
from spark_ledger.bookies.network import Unreachable
from spark_ledger.ledger.cluster import Cluster, judge
from spark_ledger.ledger.read.ledger_view import LedgerView


class LongRead:
    """Entries first..last from one bookie. Used by one task; `give_up` when done, always."""

    def __init__(
        self, cluster: Cluster, view: LedgerView, bookie_id: str, first: int, last: int
    ) -> None:
        self.bookie_id = bookie_id
        self.silent = False
        """Whether it ended because the bookie kept the reader waiting."""
        self._cluster = cluster
        self._view = view
        self._next = first
        self.last = last
        self._stream: ReadStream | None = None
        self._granted_bytes = 0

    async def next_run(self, request_bytes: int, ahead_bytes: int) -> list[Entry]:
        """The next entries as they come; none after the last, or where it goes on no more."""
        if self._next > self.last:
            return []
        try:
            if self._stream is None:
                self._stream = await self._begin(request_bytes, ahead_bytes)
            else:
                received_bytes = self._stream.received_bytes
                await self._stream.grant(received_bytes - self._granted_bytes)
                self._granted_bytes = received_bytes
            response = await self._stream.next(self._cluster.config.speculative_read_delay_s)
        except Unreachable as failure:
            self.silent = isinstance(failure, Silent)
            return []
        run = self._entries(response)
        self._next = self._next + len(run) if len(run) == len(response.results) else self.last + 1
        return run

    def give_up(self) -> None:
        """End the stream; what still comes is dropped."""
        if self._stream is not None:
            self._stream.give_up()

    async def _begin(self, request_bytes: int, ahead_bytes: int) -> ReadStream:
        return await self._cluster.bookies.read_stream(
            *(self.bookie_id, self._view.ledger_id, self._next, self.last),
            max_bytes=request_bytes,
            credit_bytes=max(1, ahead_bytes - request_bytes),
            token=self._view.token,
        )

    def _entries(self, response: ReadResponse) -> list[Entry]:
        """The entries that the response brings, up to the first that it does not."""
        run: list[Entry] = []
        if response.status is not Status.OK:
            return run
        self._view.heard(response.last_add_confirmed)
        for entry_id in range(self._next, self.last + 1):
            said = judge(response, self._view.ledger_id, len(run), entry_id)
            if said is None or not isinstance(said[1], Entry):
                return run
            run.append(said[1])
        return run
