"""A long range read as one stream from one bookie: no request to wait for between two responses.

Always true:
- what is yielded is checked, confirmed by whoever asked for the range, and in order; at whatever is
  not the next entry (damage, denial, BUSY, silence) the stream ends, and its caller goes on in
  the usual way, replica after replica;
- what is under way stays within `ahead_bytes`: credit for one response less is out, for the last
  may exceed it, and more is granted only as entries are taken.
"""

from collections.abc import AsyncGenerator, Callable

from bookie_server.api.entry import Entry
from bookie_server.api.messages import ReadResponse
from bookie_server.api.status import Status
from spark_ledger.bookies.add_lane import Unreachable
from spark_ledger.bookies.read_stream import ReadStream, Silent
from spark_ledger.ledger.cluster import Cluster, judge


class LongRead:
    """Streams of one ledger; `heard` takes every last add confirmed that responses carry."""

    def __init__(
        self, cluster: Cluster, ledger_id: int, token: bytes, heard: Callable[[int], None]
    ) -> None:
        self._cluster = cluster
        self._ledger_id = ledger_id
        self._token = token
        self._heard = heard
        self.silent = False
        """Whether the last stream ended because its bookie kept the reader waiting."""

    async def runs(
        self, bookie_id: str, first: int, last: int, request_bytes: int, ahead_bytes: int
    ) -> AsyncGenerator[list[Entry], None]:
        """Entries from `first` on, in runs as they come; to `last`, or as far as it goes well."""
        self.silent = False
        try:
            stream = await self._begin(bookie_id, first, last, request_bytes, ahead_bytes)
        except Unreachable:
            return
        try:
            used = 0
            while first <= last:
                response = await stream.next(self._patience_s)
                run = self._entries(response, first, last)
                if run:
                    yield run
                first += len(run)
                if not run or len(run) < len(response.results):
                    return
                if first <= last:
                    await stream.grant(stream.received_bytes - used)
                    used = stream.received_bytes
        except Silent:
            self.silent = True
        except Unreachable:
            return
        finally:
            stream.give_up()

    @property
    def _patience_s(self) -> float:
        return self._cluster.config.speculative_read_delay_s

    async def _begin(
        self, bookie_id: str, first: int, last: int, request_bytes: int, ahead_bytes: int
    ) -> ReadStream:
        return await self._cluster.bookies.read_stream(
            *(bookie_id, self._ledger_id, first, last),
            max_bytes=request_bytes,
            credit_bytes=max(1, ahead_bytes - request_bytes),
            token=self._token,
        )

    def _entries(self, response: ReadResponse, first: int, last: int) -> list[Entry]:
        """The entries that the response brings, up to the first that it does not."""
        run: list[Entry] = []
        if response.status is not Status.OK:
            return run
        self._heard(response.last_add_confirmed)
        while first <= last:
            said = judge(response, self._ledger_id, len(run), first)
            if said is None or not isinstance(said[1], Entry):
                return run
            run.append(said[1])
            first += 1
        return run
