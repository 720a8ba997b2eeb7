"""Few lines for many bad entries."""

from bookie_server import bad_entries
from bookie_server.bad_entries import BadEntries


def test_a_ledger_of_many_bad_entries_is_told_of_in_few_lines_that_count(caplog):
    bad = BadEntries()
    for entry_id in range(1000):
        bad.found(7, entry_id, "damaged")
    assert len(caplog.messages) == 4
    assert "ledger 7: entry 999 cannot be delivered: damaged (1000" in caplog.messages[-1]


def test_each_ledger_is_told_of_and_what_is_remembered_is_bounded(caplog, monkeypatch):
    monkeypatch.setattr(bad_entries, "LEDGERS_MAX", 3)
    bad = BadEntries()
    for ledger_id in range(10):
        bad.found(ledger_id, 0, "damaged")
    assert len(caplog.messages) == 10
    assert len(bad._counts) <= 3
