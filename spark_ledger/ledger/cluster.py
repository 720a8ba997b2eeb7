"""What the files of this room share: the cluster, and the judgement of its bookies' responses."""

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
    """By the owner of work that waits for bookies: the function that ends the work with an error.
    The client calls them when it is closed."""

    def place(
        self,
        quorum: Quorum,
        slots: Sequence[int],
        candidates: Sequence[BookieInfo],
        members: Mapping[int, BookieInfo],
    ) -> Mapping[int, str]:
        """A bookie out of `candidates` for each of `slots`, by slot; a slot that no candidate fits
        is left out. Raises BadConfig for a placement policy that misbehaves."""
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

    def reasons_text(self, reasons: Mapping[str, str]) -> str:
        """`reasons`, which are by bookie id, for an error text."""
        describe = self.directory.describe
        return "; ".join(f"{describe(bookie)}: {why}" for bookie, why in reasons.items())

    def describe(self, bookie_id: str) -> str:
        """One bookie for an error text: address, rack and, if it is a suspect, the reason."""
        rack = self.directory.rack(bookie_id)
        facts = [f"rack {rack}" if rack else "", self.bookies.quarantine.reason_for(bookie_id)]
        return ", ".join([self.directory.describe(bookie_id), *filter(None, facts)])

    def remedy_for(self, lacking: Collection[str]) -> str | None:
        """What to do about the bookies `lacking`, which take no new entries; None if no such bookie
        is read-only (as it is with a full disk)."""
        readonly = [bookie for bookie in lacking if self.directory.is_readonly(bookie)]
        if not readonly:
            return None
        if len(readonly) == len(lacking):
            return "Free space where a disk is full, or add bookies."
        return "Start the missing bookies, free space where a disk is full, or add bookies."


T = TypeVar("T")


class DeliveryFailure(NamedTuple):
    """Why a bookie did not deliver an entry: the status for this entry, if it sent any, and a text
    for people. `is_copy_damaged`: the bookie cannot read its copy, or sent a damaged one."""

    status: Status | None
    text: str
    is_copy_damaged: bool = False

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, response: ReadResponse | ReadLacResponse) -> "DeliveryFailure":
        """The failure when the bookie refused the whole request."""
        return cls(response.status, status_text(response))

    @classmethod
    def of_damaged_copy(cls, why: str) -> "DeliveryFailure":
        """The failure when the bookie sent a copy that is not the entry."""
        return cls(Status.BAD_DIGEST, f"{Status.BAD_DIGEST.name} {why}", is_copy_damaged=True)


BAD_COPY = DeliveryFailure(
    Status.IO_ERROR, "IO_ERROR its copy is damaged or unreadable", is_copy_damaged=True
)


def status_text(
    response: AddResult | ReadResponse | ReadLacResponse | ClearLimboResponse | StoredResponse,
) -> str:
    """The status of a response and its reason, for an error text."""
    return f"{response.status.name} {response.reason}".strip()


async def responses_on_arrival(
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


def judge_response(
    response: ReadResponse, ledger_id: int, at: int, entry_id: int
) -> tuple[Meaning, Entry | DeliveryFailure] | None:
    """What the response to a read means for one entry, with the checked entry or the reason why
    the bookie did not deliver it; None if the response stops before the entry. `at` is the entry's
    position in the request, counted from 0."""
    if response.status is not Status.OK:
        return recovery_meaning(response.status), DeliveryFailure.of(response)
    if (result := response.result(at)) is None:
        return None
    if result.status is Status.IO_ERROR:
        return recovery_meaning(result.status), BAD_COPY
    if result.status is not Status.OK:
        return recovery_meaning(result.status), DeliveryFailure(result.status, result.status.name)
    try:
        entry = result.checked or unpack_entry(result.entry)
    except DamagedEntry as damage:
        return Meaning.UNKNOWN, DeliveryFailure.of_damaged_copy(str(damage))
    if (entry.header.ledger_id, entry.header.entry_id) != (ledger_id, entry_id):
        return Meaning.UNKNOWN, DeliveryFailure.of_damaged_copy("another entry came")
    return Meaning.POSITIVE, entry


def has_entry(judged: tuple[Meaning, Entry | DeliveryFailure] | None) -> bool:
    """Whether the result of `judge_response` has the entry."""
    return judged is not None and isinstance(judged[1], Entry)
