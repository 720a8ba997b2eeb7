"""Brokers and a bookie die while consumers share subscriptions."""

import os
import secrets

import pytest

from tests.crash import sharing_kills


@pytest.mark.slow
def test_killing_brokers_under_shared_consumers_loses_nothing_and_repeats_nothing_with_a_receipt(
    tmp_path,
):
    seed = int(os.environ.get("CHAOS_SEED", secrets.randbelow(1 << 32)))
    sharing_kills.run(30.0, tmp_path, seed)
