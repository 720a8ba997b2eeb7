"""Free ports for servers on one machine."""

import pytest

from spark_ledger.errors import Unavailable
from spark_ledger.local import processes


@pytest.fixture
def taken(monkeypatch):
    """The ports that others use."""
    ports: set[int] = set()
    monkeypatch.setattr(processes.net, "is_free", lambda host, port: port not in ports)
    return ports


def test_a_process_gets_a_port_a_second_time_only_when_no_other_is_left(taken, monkeypatch):
    monkeypatch.setattr(processes, "PORTS", range(1, 4))
    assert {processes.free_port() for _ in range(3)} == {1, 2, 3}
    assert processes.free_port() in (1, 2, 3)


def test_a_port_that_others_use_is_not_given(taken, monkeypatch):
    monkeypatch.setattr(processes, "PORTS", range(11, 14))
    taken.update((11, 13))
    assert [processes.free_port() for _ in range(2)] == [12] * 2
    taken.add(12)
    with pytest.raises(Unavailable, match="between 11 and 14"):
        processes.free_port()
