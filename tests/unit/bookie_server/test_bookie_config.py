from dataclasses import fields

import pytest

from bookie_server.api.settings import BadSettings, load
from bookie_server.config import BookieConfig, advertised_address
from bookie_server.storage_config import StorageConfig


def test_the_storage_engines_limits_are_settings_with_its_defaults():
    assert BookieConfig().storage() == StorageConfig()
    assert {part.name for part in fields(StorageConfig)} <= BookieConfig.model_fields.keys()


def test_a_limit_that_is_set_reaches_the_storage_engine():
    assert load(BookieConfig, None, {"retry_after_ms": "5"}).storage().retry_after_ms == 5


def test_limits_that_the_largest_entry_does_not_fit_are_refused():
    with pytest.raises(BadSettings, match="journal_pending_bytes_max must leave"):
        load(BookieConfig, None, {"journal_pending_bytes_max": 1024})


@pytest.mark.parametrize("listen", ["3181", "host", "host:port", ":3181", "host:70000"])
def test_an_address_to_listen_on_is_host_and_port(listen):
    with pytest.raises(BadSettings, match=r"listen: .*host:port"):
        load(BookieConfig, None, {"listen": listen})


@pytest.mark.parametrize(
    ("listen", "advertised", "told"),
    [
        ("127.0.0.1:3181", "", "127.0.0.1:3181"),
        ("127.0.0.1:0", "", "127.0.0.1:9"),
        ("0.0.0.0:3181", "node-1", "node-1:9"),
        ("0.0.0.0:3181", "node-1:80", "node-1:80"),
        ("[::1]:0", "", "[::1]:9"),
        ("0.0.0.0:0", "[::1]", "[::1]:9"),
    ],
)
def test_clients_are_told_the_advertised_address_or_the_bound_one(listen, advertised, told):
    config = BookieConfig(listen=listen, advertised=advertised)
    port = 9 if told.endswith(":9") else 3181
    assert advertised_address(config, port) == told
