"""Killing what may die loses nothing and doubles nothing."""

import os
import secrets

import pytest

from tests.crash import chaos


@pytest.mark.slow
def test_killing_bookies_drivers_and_workers_loses_and_doubles_no_row():
    seed = int(os.environ.get("CHAOS_SEED", secrets.randbelow(1 << 32)))
    chaos.run(kills=2, seed=seed)
