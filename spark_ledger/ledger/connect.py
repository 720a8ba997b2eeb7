"""Wire a LedgerStore to a real cluster: ZooKeeper for metadata, frames to the bookies."""

import os
import random

from spark_ledger.config import ClientConfig, client_config
from spark_ledger.errors import Unavailable, UnsupportedFormat
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.placement import resolve


async def connect(service_url: str, config: ClientConfig | None = None) -> LedgerStore:
    """Connect to the cluster at `service_url` (zk://host:port[,host:port]/root).

    Raises BadConfig for a malformed URL or a `placement` that is no function, Unavailable (naming
    the URL) when ZooKeeper is unreachable or when there is no cluster at its root;
    UnsupportedFormat when the cluster's record is damaged or of a later version.
    """
    from spark_ledger.bookies.bookie_client import BookieClient
    from spark_ledger.bookies.directory import BookieDirectory
    from spark_ledger.bookies.frame_network import FrameNetwork
    from spark_ledger.metadata import cluster, zookeeper
    from spark_ledger.metadata.store import StoreError

    settings = config or client_config(service_url=service_url)
    placement = resolve(settings.placement)
    metadata = await zookeeper.connect(
        service_url,
        session_timeout_s=settings.session_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        call_timeout_s=settings.metadata_timeout_s,
        outage_timeout_s=settings.outage_timeout_s,
        make_root=False,
    )
    directory = BookieDirectory(metadata, settings.directory_refresh_s)
    try:
        if await cluster.read(metadata) is None:
            raise Unavailable(
                f"ZooKeeper answers, but there is no cluster at {service_url}",
                "Check the root, the part after the port.",
            )
        await directory.start()
    except BaseException as failure:  # given up by the caller, too: the session must end
        await metadata.close()
        if isinstance(failure, StoreError):
            text = f"the bookies of {service_url} cannot be listed: {failure!r}"
            raise Unavailable(text) from failure
        if isinstance(failure, cluster.BadClusterRecord):
            raise UnsupportedFormat(f"the cluster at {service_url}: {failure}") from failure
        raise
    bookies = BookieClient(FrameNetwork(), directory, settings)
    rng = random.Random(int.from_bytes(os.urandom(16)))
    return LedgerStore(metadata, bookies, directory, settings, rng, placement)
