"""Connections that a process keeps: one LedgerStore per process, cluster and time that it waits for
the end of an outage.

Always true: a store is used only in the process and on the loop that made it; a forked child
connects by itself. A connection that could not be made is tried again at the next call.
"""

import os
import threading

from spark_ledger.client.loop import background_loop
from spark_ledger.config import ClientConfig, resolve_service_url
from spark_ledger.ledger.client import LedgerStore

_stores: dict[tuple[int, str, float], LedgerStore] = {}
_connecting = threading.Lock()


def ledger_store(service_url: str | None = None, config: ClientConfig | None = None) -> LedgerStore:
    """The process's LedgerStore of the cluster (None: as `config`, LEDGER_SERVICE_URL or the
    default say).

    It lives on `background_loop()`. Stores whose `outage_timeout_s` differs are two; the rest of
    `config` matters to whoever connects first. Raises BadConfig, Unavailable.
    """
    from spark_ledger.ledger.connect import connect

    url = resolve_service_url(service_url, config)
    key = (os.getpid(), url, 0.0 if config is None else config.outage_timeout_s)
    with _connecting:
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = background_loop().run(connect(url, config))
        return store


def close_all() -> None:
    """Close every connection of this process."""
    with _connecting:
        pid = os.getpid()
        for key in [key for key in _stores if key[0] == pid]:
            background_loop().run(_stores.pop(key).close())


def _after_fork() -> None:
    global _connecting
    _connecting = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_after_fork)
