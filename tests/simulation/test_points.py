"""Verbs of the topic layer, and a broker, are cut short at their calls to the outside; all points
are run by `python -m tests.simulation points`, here some of each deed, others with another
POINTS_START; of these `make test` takes a third, more of a broker's, and the first point of each
fate: of a process that ends before it has done anything, say."""

import os

import pytest

from tests.simulation.__main__ import main
from tests.simulation.points import brokers
from tests.simulation.points.command import DEEDS
from tests.simulation.points.enumerate import calls_of, points_of, run_point
from tests.simulation.warm import quiet

EVERY, PARTS = 83, 3
EVERY_OF_BROKERS = 53
FIRST = int(os.environ.get("POINTS_START", "0"))


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


def early(points):
    """The first point of each fate."""
    return list({point.fate: point for point in reversed(points)}.values())


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.name.replace(" ", "-"))
def test_a_verb_that_is_cut_short_leaves_nothing_wrong_behind(deed, part):
    calls = calls_of(deed)
    assert len(calls) > 10
    points = points_of(deed, calls)
    sample = points[FIRST % len(points) :: EVERY][part::PARTS]
    first = [] if part else early(points)
    for point in (*first, *(one for one in sample if one not in first)):
        run_point(point)


@pytest.mark.parametrize("deed", brokers.DEEDS, ids=lambda deed: deed.name.replace(" ", "-"))
def test_a_broker_that_is_cut_short_loses_and_doubles_nothing(deed):
    points = points_of(deed, calls_of(deed))
    assert len(points) > 400
    for point in points[FIRST % len(points) :: EVERY_OF_BROKERS]:
        run_point(point)


def test_the_calls_of_a_deed_are_the_same_each_time():
    assert calls_of(DEEDS[0]) == calls_of(DEEDS[0])


def test_a_deed_that_is_none_is_refused(capsys):
    assert main(["points", "--deed", "nothing"]) == 2
    assert "there is no deed 'nothing'; there are: commit" in capsys.readouterr().err
