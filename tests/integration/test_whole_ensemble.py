"""Bookies that are lost for a while: a writer goes on with others, what was confirmed is read again
as soon as one copy of it is back, and one of three is not needed to begin a ledger."""

import time
from concurrent.futures import ThreadPoolExecutor

import pulsar
import pytest

from spark_ledger import LedgerClient
from spark_ledger.config import ClientConfig
from spark_ledger.errors import DataUnavailable
from tests.integration.holds import registered
from tests.integration.pulsar_clients import TIMEOUT_MS, connected
from tests.kit.processes import eventually

FIRST, THEN = 20, 10


def payload(number: int) -> bytes:
    return b"entry %d" % number


def test_a_writer_goes_on_with_others_and_one_copy_that_is_back_is_enough_to_read(fresh_cluster):
    cluster = fresh_cluster(bookies=6)
    with LedgerClient(cluster.service_url, ClientConfig(read_timeout_s=10)) as client:
        writer = client.create_ledger(3, 3, 3)  # so that each has every entry
        for number in range(FIRST):
            writer.append(payload(number))
        members = client.ledger_metadata(writer.ledger_id).last_fragment.ensemble
        lost = [bookie for bookie in cluster.bookies if bookie.id in members]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda bookie: bookie.kill(), lost))
        for number in range(FIRST, FIRST + THEN):
            writer.append(payload(number))
        writer.close()

        def read(first: int, last: int) -> list[bytes]:
            with client.open_ledger(writer.ledger_id, recover=False) as reader:
                return [bytes(each) for _, each in reader.read(first, last)]

        def reads_all() -> bool:
            try:
                return read(0, FIRST + THEN - 1) == everything
            except DataUnavailable:
                return False

        everything = [payload(number) for number in range(FIRST + THEN)]
        assert read(FIRST, FIRST + THEN - 1) == everything[FIRST:]
        with pytest.raises(DataUnavailable):
            read(0, FIRST - 1)
        lost[1].start()
        assert eventually(reads_all)


def test_with_one_of_three_bookies_away_new_topics_and_idle_ones_take_messages_at_once(
    fresh_cluster,
):
    cluster = fresh_cluster(bookies=3)
    with connected(cluster.broker_url) as client:
        idle = client.create_producer("idle")
        idle.send(b"0")
        cluster.broker.stop()  # seals, as a minute without a message does
        killed = cluster.bookies[0]
        killed.kill()
        assert eventually(lambda: registered(cluster) == 2, 60)
        cluster.broker.start()
        idle.send(b"1")
        began_s = time.monotonic()
        client.create_producer("new").send(b"2")
        print(f"a new topic's first receipt came after {time.monotonic() - began_s:.2f} s")
        reader = client.create_reader("idle", pulsar.MessageId.earliest)
        assert [reader.read_next(TIMEOUT_MS).data() for _ in range(2)] == [b"0", b"1"]
        killed.start()
        idle.send(b"3")
        assert reader.read_next(TIMEOUT_MS).data() == b"3"
