"""Every bookie of a ledger lost for a while: its writer goes on with others, and what was confirmed
is read again as soon as one copy of it is back."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_ledger import LedgerClient
from spark_ledger.config import ClientConfig
from spark_ledger.errors import DataUnavailable
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
