"""Brokers die under load, twenty times."""

import pytest

from tests.crash import broker_kills


@pytest.mark.slow
def test_killing_brokers_under_load_moves_loses_and_doubles_nothing(tmp_path):
    broker_kills.run(20, tmp_path)
