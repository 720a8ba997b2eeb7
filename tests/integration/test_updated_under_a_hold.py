"""Records of an earlier version (tests/stored: no chain, no creators of stored entries, no epoch)
under the processes of this one while the metadata store is held, and after an accept."""

import asyncio

import pytest

from spark_ledger import LedgerClient, errors
from spark_ledger.local import LocalCluster
from spark_ledger.metadata import cluster, hold
from spark_ledger.metadata.cluster import IDS_PER_EPOCH, Hold
from spark_ledger.metadata.zookeeper import connect
from spark_ledger.topic import blocking
from tests.integration.holds import registered, standing
from tests.integration.topic_rows import read_all, write_and_commit
from tests.kit.processes import eventually
from tests.stored import contents

THEN = contents.expected()
CLOSED = sorted(THEN["ledgers"].keys() - {"deleted", *contents.LEFT_OPEN})


def of_store(url: str, ask):
    async def asked():
        store = await connect(url)
        try:
            return await ask(store)
        finally:
            await store.close()

    return asyncio.run(asked())


def held(url: str) -> None:
    async def put(store) -> None:
        here = await cluster.read(store)
        await hold.put(store, here.cluster_id, Hold("a test", "a bookie"))

    of_store(url, put)


def the_ledgers_are_those_of_then(client: LedgerClient) -> None:
    for name in CLOSED:
        then = THEN["ledgers"][name]
        password = contents.PASSWORD if name == "secret" else b""
        assert contents.ledger_facts(client, then["id"], password) | {"id": then["id"]} == then


def test_what_an_earlier_version_wrote_is_read_under_a_hold_and_written_on_after_an_accept(
    tmp_path,
):
    contents.unpack(tmp_path)
    folder = tmp_path / contents.CLUSTER
    with LocalCluster(contents.BOOKIES, folder, autorecovery=False) as stored:
        url = stored.service_url
        topics = blocking.topics(url)
        info = topics.run(topics.client.topics.open("stopped-in"))
        rows = read_all(topics, info)
        with LedgerClient(url) as client:
            the_ledgers_are_those_of_then(client)
            held(url)
            assert eventually(lambda: len(standing(stored).reports) == contents.BOOKIES, 30)
            missing = standing(stored).missing.keys()  # that version deleted without naming
            assert THEN["ledgers"]["deleted"]["id"] in missing
            assert not missing & {THEN["ledgers"][name]["id"] for name in CLOSED}
            the_ledgers_are_those_of_then(client)
            assert read_all(topics, info) == rows
            for refused in (
                lambda: client.create_ledger(3, 3, 2),
                lambda: client.delete_ledger(THEN["ledgers"]["closed"]["id"]),
                lambda: topics.run(topics.client.topics.create("new")),
                lambda: write_and_commit(topics, info, 0, [b"refused"]),
            ):
                with pytest.raises(errors.MetadataHeld):
                    refused()
            of_store(url, hold.accept)
            assert eventually(lambda: registered(stored) == contents.BOOKIES, 30)
            the_ledgers_are_those_of_then(client)
            assert client.create_ledger(3, 3, 2).ledger_id >= IDS_PER_EPOCH
            client.delete_ledger(THEN["ledgers"]["closed"]["id"])
        stored.bookies[0].stop()  # its disks have seen the epoch now
        stored.bookies[0].start()
        with LedgerClient(url) as client:
            left_open = THEN["ledgers"]["killed"]  # closed by recovery, of entries without creator
            found = contents.ledger_facts(client, left_open["id"])
            assert found | {"id": left_open["id"]} == left_open
        write_and_commit(topics, info, 0, [b"after"])
        assert read_all(topics, info)[: len(rows)] == rows
        assert len(read_all(topics, info)) == len(rows) + 1
