"""The async client of ledgers: create, open, recover, delete, list. Signatures first."""

import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store import MetadataStore

if TYPE_CHECKING:
    from spark_ledger.bookies.bookie_client import BookieClient
    from spark_ledger.bookies.directory import BookieDirectory
    from spark_ledger.config import ClientConfig
    from spark_ledger.ledger.reader import LedgerReader
    from spark_ledger.ledger.writer import LedgerWriter


@dataclass(frozen=True, slots=True)
class VersionedRecord:
    record: LedgerRecord
    version: int


class LedgerStore:
    def __init__(
        self,
        metadata: MetadataStore,
        bookies: "BookieClient",
        directory: "BookieDirectory",
        config: "ClientConfig",
        rng: random.Random,
    ) -> None:
        self.metadata = metadata
        self.config = config

    async def create(
        self,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        *,
        password: bytes = b"",
        custom: Mapping[str, str] | None = None,
        intent: str = "",
        topic: str = "",
        durability: str = "synced",
        ledger_id: int | None = None,
        announce_lac: bool = False,
    ) -> "LedgerWriter":
        raise NotImplementedError

    async def open(
        self, ledger_id: int, *, recover: bool, password: bytes = b""
    ) -> "LedgerReader":
        raise NotImplementedError

    async def recover(self, ledger_id: int, *, password: bytes = b"") -> VersionedRecord:
        raise NotImplementedError

    async def record(self, ledger_id: int, *, fresh: bool = False) -> VersionedRecord:
        raise NotImplementedError

    async def delete(self, ledger_id: int) -> None:
        raise NotImplementedError

    def list(self) -> AsyncIterator[int]:
        raise NotImplementedError

    async def allocate_ids(self, count: int) -> range:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
