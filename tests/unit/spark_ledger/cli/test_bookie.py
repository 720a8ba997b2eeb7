"""What `spark-ledger bookie` says and refuses before it asks anybody."""

import pytest

from spark_ledger.cli import nodes
from spark_ledger.errors import BadConfig


@pytest.mark.parametrize(
    "address", ["127.0.0.1:99999", "127.0.0.1:0", "host:65536", "host:-1", "host:", ":3181", "a:b"]
)
@pytest.mark.parametrize("command", [nodes.info, nodes.ready], ids=["info", "ready"])
def test_an_address_with_a_port_that_is_none_is_refused_and_nobody_is_asked(
    monkeypatch, command, address
):
    def asked(*_):
        raise AssertionError("another port was asked")

    monkeypatch.setattr(nodes, "request_info", asked)
    with pytest.raises(BadConfig, match="a port from 1 to 65535") as wrong:
        command(address)
    assert address in str(wrong.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "host:65535", "[::1]:3181"])
def test_an_address_is_host_and_port(address):
    assert nodes.checked_address(address) == address
