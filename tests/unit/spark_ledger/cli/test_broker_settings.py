"""The settings of a broker: options of its command, a file, defaults."""

import pytest
from typer.testing import CliRunner

from spark_ledger.broker import server
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.cli.main import app
from spark_ledger.errors import BadConfig
from spark_ledger.local import background

URL = "zk://127.0.0.1:9/of-the-file"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Runs `broker start` with a file of settings; returns what it would serve with."""
    served = []
    monkeypatch.delenv("LEDGER_SERVICE_URL", raising=False)
    monkeypatch.setattr(server, "serve", lambda url, settings, **_: served.append((url, settings)))

    def run(text, *options):
        file = tmp_path / "broker.toml"
        file.write_text(text)
        result = CliRunner().invoke(app, ["broker", "start", "--config", str(file), *options])
        return served.pop() if served else result

    return run


def test_an_option_wins_over_the_file_of_settings_and_the_file_over_the_default(start):
    text = f'service_url = "{URL}"\nbroker_port = 7000\nauto_create = false\nroll_entries = 9\n'
    url, settings = start(text, "--broker-port", "0", "--auto-create-partitions", "4")
    assert url == URL
    given = {"service_url": URL, "broker_port": 0, "auto_create": False, "roll_entries": 9}
    assert settings == DEFAULTS.model_copy(update=given | {"auto_create_partitions": 4})
    url, settings = start(text, "--auto-create", "--service-url", "zk://127.0.0.1:9/given")
    assert (url, settings.auto_create) == ("zk://127.0.0.1:9/given", True)


def test_a_file_with_a_setting_that_a_broker_lacks_is_refused_with_the_nearest_name(start):
    result = start("tail_byte = 1\n")
    assert result.exit_code != 0
    assert "the nearest is 'tail_bytes'" in str(result.exception)


@pytest.fixture
def up(monkeypatch, tmp_path):
    """Runs `up` with a file of the broker's settings; returns the file that its broker would
    have."""
    given = []

    def start(*_, broker_config, **__):
        given.append(broker_config)
        raise BadConfig("nothing starts in this test")

    monkeypatch.setattr(background, "up", start)

    def run(text):
        file = tmp_path / "broker.toml"
        file.write_text(text)
        options = ["--data-dir", str(tmp_path / "data"), "--broker-config", str(file)]
        result = CliRunner().invoke(app, ["up", *options])
        return given.pop() if given else result

    return run


def test_the_broker_of_up_has_the_settings_of_a_file(up, tmp_path):
    assert up("message_bytes_max = 1_048_576\n") == tmp_path / "broker.toml"


def test_up_with_a_wrong_file_of_its_brokers_settings_starts_nothing(up):
    assert "the nearest is 'tail_bytes'" in str(up("tail_byte = 1\n").exception)
