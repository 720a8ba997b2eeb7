"""The simulated metadata store does what every MetadataStore must, as ZooKeeper does."""

import random

import pytest

from spark_ledger.metadata.store import MetadataStore
from tests.kit.store_contract import CONTRACT
from tests.simulation.loop import run
from tests.simulation.store import SimStore, StoreFaults


@pytest.mark.parametrize("lag_s", [0.0, 5.0])
@pytest.mark.parametrize("sentence", CONTRACT)
def test_the_simulated_store_keeps_the_contract(sentence, lag_s):
    async def main() -> None:
        store = SimStore(random.Random(f"{sentence}/{lag_s}"), StoreFaults(lag_s=lag_s))

        async def open_store() -> MetadataStore:
            return store.session("contract")

        await CONTRACT[sentence](open_store)

    run(main())
