"""Records of the metadata store that are JSON, and not what they should be: each decoder refuses
them by its own error, or passes over them."""

import pytest

from bookie_server.serve import twin
from spark_ledger import errors
from spark_ledger.metadata import chain, cluster, hold, ledger_record
from spark_ledger.topic.log import records

STRANGE = (
    b"",
    b"\xff",
    b"1",
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"number":1e999,"token":"t","format":1,"id":"x","epoch":1e999,"min_reader":1e999}',
    b'{"links":{"1e999":"t"},"format":1e999,"next":1e999,"min_reader":1,"version":1e999}',
)
REFUSED = {
    chain.decode: chain.BadChain,
    cluster.decode: cluster.BadClusterRecord,
    ledger_record.decode: ledger_record.BadLedgerRecord,
    records.decode_commit: errors.UnsupportedFormat,
    records.decode_txn: errors.UnsupportedFormat,
    records.decode_intent: errors.UnsupportedFormat,
    records.decode_block: errors.UnsupportedFormat,
    hold.decode_counter: errors.LedgerError,
}


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("decode", REFUSED)
def test_a_record_that_is_not_what_it_should_be_is_refused_by_its_own_error(decode, value):
    with pytest.raises(REFUSED[decode]):
        decode(value)


@pytest.mark.parametrize("value", STRANGE)
def test_a_bookies_start_that_is_not_what_it_should_be_is_passed_over(value):
    assert twin.decode(value) is None
