"""Shared by the ledger's parts: the cluster that they work in, and how they ask its bookies."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from bookie_server.api.entry import DamagedEntry, Entry, unpack_entry
from bookie_server.api.messages import (
    AddResult,
    ClearLimboResponse,
    ReadLacResponse,
    ReadResponse,
    StoredResponse,
)
from bookie_server.api.status import Meaning, Status, recovery_meaning
from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.bookies.directory import BookieDirectory, BookieInfo
from spark_ledger.config import ClientConfig
from spark_ledger.errors import LedgerError
from spark_ledger.ledger.placement import Placement, PlacementRequest, choose
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.records import LedgerRecords


@dataclass(frozen=True, slots=True)
class Cluster:
    """One cluster as one client sees it. `rng` is the only source of chance."""

    records: LedgerRecords
    bookies: BookieClient
    directory: BookieDirectory
    config: ClientConfig
    rng: random.Random
    placement: Placement = choose
    at_close: dict[object, Callable[[LedgerError], None]] = field(default_factory=dict)
    """How to end work that waits for bookies when the client is closed, by the work's owner."""

    def place(
        self,
        quorum: Quorum,
        slots: Sequence[int],
        candidates: Sequence[BookieInfo],
        members: Mapping[int, BookieInfo],
    ) -> Mapping[int, str]:
        """Bookies for `slots` of an ensemble out of `candidates`, as far as there are any that
        fit. Raises BadConfig for a placement policy that misbehaves."""
        request = PlacementRequest(
            candidates=tuple(candidates),
            slots=tuple(slots),
            ensemble_size=quorum.ensemble_size,
            write_quorum=quorum.write_quorum,
            ack_quorum=quorum.ack_quorum,
            members=members,
            suspects=tuple(self.bookies.quarantine.suspects()),
            racks=self.config.racks,
        )
        return self.placement(request, self.rng)

    def explained(self, reasons: Mapping[str, str]) -> str:
        """For an error text: each of these bookies, and the reason why it is in the way."""
        describe = self.directory.describe
        return "; ".join(f"{describe(bookie)}: {why}" for bookie, why in reasons.items())

    def describe(self, bookie_id: str) -> str:
        """One bookie for an error text, with its rack and, if it is chosen last, the reason."""
        rack = self.directory.rack(bookie_id)
        facts = [f"rack {rack}" if rack else "", self.bookies.quarantine.why(bookie_id)]
        return ", ".join([self.directory.describe(bookie_id), *filter(None, facts)])

    def remedy_for(self, lacking: Collection[str]) -> str | None:
        """What to do about bookies that take no new entries, if some are read-only (as a bookie
        with a full disk is); None if all are missing."""
        readonly = [bookie for bookie in lacking if self.directory.is_readonly(bookie)]
        if not readonly:
            return None
        if len(readonly) == len(lacking):
            return "Free space where a disk is full, or add bookies."
        return "Start the missing bookies, free space where a disk is full, or add bookies."


T = TypeVar("T")


class Undelivered(NamedTuple):
    """Why a bookie did not deliver an entry: the status (None: the bookie sent none for this entry)
    and a text for people. `of_copy`: the bookie responded, and its copy of the entry is damaged or
    cannot be read."""

    status: Status | None
    text: str
    of_copy: bool = False

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, response: ReadResponse | ReadLacResponse) -> "Undelivered":
        """The bookie refused the whole request."""
        return cls(response.status, say(response))

    @classmethod
    def damaged(cls, why: str) -> "Undelivered":
        """The bookie sent its copy, and the copy is not the entry."""
        return cls(Status.BAD_DIGEST, f"{Status.BAD_DIGEST.name} {why}", of_copy=True)


BAD_COPY = Undelivered(Status.IO_ERROR, "IO_ERROR its copy is damaged or unreadable", of_copy=True)


def say(
    response: AddResult | ReadResponse | ReadLacResponse | ClearLimboResponse | StoredResponse,
) -> str:
    """The status of a response and its reason, for an error text."""
    return f"{response.status.name} {response.reason}".strip()


async def as_responded(
    requests: Sequence[Coroutine[Any, Any, T]],
) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the request, its response) in the order of arrival.

    Close it (contextlib.aclosing) to give up the requests that are still open.
    """
    arrived: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    tasks = {asyncio.ensure_future(request): index for index, request in enumerate(requests)}
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        for _ in requests:
            task = await arrived.get()
            yield tasks[task], task.result()
    finally:
        for task in tasks:
            task.cancel()


def judge(
    response: ReadResponse, ledger_id: int, at: int, entry_id: int
) -> tuple[Meaning, Entry | Undelivered] | None:
    """The meaning of a read's response for one entry, with the checked entry, or the reason why it
    was not delivered. `at` is the number of entries before it in the request. None if the response
    stops before the entry."""
    if response.status is not Status.OK:
        return recovery_meaning(response.status), Undelivered.of(response)
    if at >= len(response.results):
        return None
    result = response.results[at]
    if result.status is Status.IO_ERROR:
        return recovery_meaning(result.status), BAD_COPY
    if result.status is not Status.OK:
        return recovery_meaning(result.status), Undelivered(result.status, result.status.name)
    try:
        entry = result.checked or unpack_entry(result.entry)
    except DamagedEntry as damage:
        return Meaning.UNKNOWN, Undelivered.damaged(str(damage))
    if (entry.header.ledger_id, entry.header.entry_id) != (ledger_id, entry_id):
        return Meaning.UNKNOWN, Undelivered.damaged("another entry came")
    return Meaning.POSITIVE, entry


def has_entry(judged: tuple[Meaning, Entry | Undelivered] | None) -> bool:
    """Whether a response, as `judge` judged it, delivers the entry."""
    return judged is not None and isinstance(judged[1], Entry)
