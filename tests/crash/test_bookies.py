"""Bookies killed under load have all that they acknowledged when they are started again."""

import os
import secrets

from tests.crash import bookies


def test_bookies_killed_under_load_lose_nothing_that_they_acknowledged():
    seed = int(os.environ.get("CHAOS_SEED", secrets.randbelow(1 << 32)))
    bookies.run(kills=5, seed=seed)
