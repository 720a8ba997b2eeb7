import asyncio
import pickle
from pathlib import Path

import pytest

from spark_ledger.config import (
    DEFAULT_SERVICE_URL,
    ClientConfig,
    client_config,
    resolve_service_url,
)
from spark_ledger.errors import BadConfig, Unavailable
from spark_ledger.metadata import zookeeper
from spark_ledger.process import connect


@pytest.fixture(autouse=True)
def no_service_url(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LEDGER_SERVICE_URL", raising=False)


def test_a_service_url_given_wins_over_the_environment_and_that_over_the_default(monkeypatch):
    assert resolve_service_url() == DEFAULT_SERVICE_URL
    assert client_config().service_url == DEFAULT_SERVICE_URL
    monkeypatch.setenv("LEDGER_SERVICE_URL", "zk://there:1/x")
    assert resolve_service_url() == client_config().service_url == "zk://there:1/x"
    assert resolve_service_url("zk://here:1/x") == "zk://here:1/x"
    assert client_config(service_url="zk://here:1/x").service_url == "zk://here:1/x"


def test_settings_come_from_a_file_and_are_overridden(tmp_path: Path):
    file = tmp_path / "client.toml"
    file.write_text("ensemble_size = 5\nwrite_quorum = 4\n")
    config = client_config(file, write_quorum=3)
    assert (config.ensemble_size, config.write_quorum, config.ack_quorum) == (5, 3, 2)


def test_a_file_without_a_service_url_leaves_it_to_the_environment(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("LEDGER_SERVICE_URL", "zk://there:1/x")
    file = tmp_path / "client.toml"
    file.write_text("ack_quorum = 1\n")
    assert client_config(file).service_url == "zk://there:1/x"
    assert client_config(file, service_url="zk://here:1/x").service_url == "zk://here:1/x"
    file.write_text('service_url = "zk://file:1/x"\n')
    assert client_config(file).service_url == "zk://file:1/x"


def test_an_unknown_setting_names_the_nearest_one():
    with pytest.raises(BadConfig, match=r"'inflight_byte'.*nearest is 'inflight_bytes'"):
        client_config(inflight_byte=1)


def test_a_value_of_the_wrong_kind_names_its_setting():
    with pytest.raises(BadConfig, match=r"ack_quorum.*'two'"):
        client_config(ack_quorum="two")


def test_quorums_that_do_not_fit_are_refused():
    with pytest.raises(BadConfig, match="ensemble_size >= write_quorum >= ack_quorum"):
        client_config(ensemble_size=2)


def test_settings_reach_another_process_unchanged():
    config = client_config(frames_in_flight=9)
    assert pickle.loads(pickle.dumps(config)) == config
    assert isinstance(config, ClientConfig)


def test_a_client_gives_the_metadata_store_the_times_that_are_set(monkeypatch):
    given = {}

    async def no_store(service_url, **times):
        given.update(times)
        raise Unavailable("nobody answers")

    monkeypatch.setattr(zookeeper, "connect", no_store)
    given_s = {"session_timeout_s": 7, "connect_timeout_s": 3, "outage_timeout_s": 60}
    config = client_config(metadata_timeout_s=2, **given_s)
    with pytest.raises(Unavailable):
        asyncio.run(connect("zk://127.0.0.1:1/x", config))
    times = {name: value for name, value in given.items() if name.endswith("_s")}
    assert times == {"call_timeout_s": 2, **given_s}
