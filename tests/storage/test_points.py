"""A crash between every two disk operations, and a call that takes very long or fails: enumerated,
not sampled.

STORAGE_POINTS=all: each crash with all of PERSISTENCES (four), not with two of them, and every wait
of every deed, not one in WAITS of them.
"""

import os

import pytest

from tests.storage.deeds import DEEDS
from tests.storage.pauses import PAUSED, enumerate_pauses
from tests.storage.points import PERSISTENCES, Deed, enumerate_points

EVERY = os.environ.get("STORAGE_POINTS") == "all"
WAITS = 5


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.name.replace(" ", "-"))
def test_a_crash_between_any_two_operations_breaks_no_promise(deed: Deed):
    points = enumerate_points(deed, PERSISTENCES if EVERY else PERSISTENCES[::2])
    print(
        f"\n{deed.name}: {len(points.operations)} operations, {points.crashes} crashes,"
        f" {points.second_crashes} of them followed by one more at the start"
    )


@pytest.mark.parametrize("deed", PAUSED, ids=lambda deed: deed.name.replace(" ", "-"))
def test_a_call_that_takes_very_long_or_fails_breaks_no_promise(deed: Deed):
    pauses = enumerate_pauses(deed, PAUSED.index(deed), 1 if EVERY else WAITS)
    print(f"\n{deed.name}: {len(pauses.waits)} waits, {pauses.failures} failures of the store")
