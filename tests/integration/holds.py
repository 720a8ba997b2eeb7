"""The hold of a cluster whose metadata store went back, and commands of its operator."""

import asyncio
import json
import subprocess
import sys
from typing import Any

from spark_ledger.local import LocalCluster
from spark_ledger.metadata import hold
from spark_ledger.metadata.zookeeper import connect


def standing(cluster: LocalCluster) -> hold.StoreStatus:
    async def ask() -> hold.StoreStatus:
        store = await connect(cluster.service_url)
        try:
            return await hold.status(store)
        finally:
            await store.close()

    return asyncio.run(ask())


def command(cluster: LocalCluster, *arguments: str) -> Any:
    """What `spark-ledger ... --json` prints."""
    words = [sys.executable, "-m", "spark_ledger.cli.main", *arguments, "--json"]
    run = subprocess.run(
        [*words, "--service-url", cluster.service_url], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def registered(cluster: LocalCluster) -> int:
    states = [bookie["state"] for bookie in command(cluster, "bookie", "list")]
    return sum(state == "rw" for state in states)
