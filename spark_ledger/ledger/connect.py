"""Wire a LedgerStore to a real cluster. Signature first."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_ledger.config import ClientConfig
    from spark_ledger.ledger.client import LedgerStore


async def connect(service_url: str, config: "ClientConfig | None" = None) -> "LedgerStore":
    raise NotImplementedError
