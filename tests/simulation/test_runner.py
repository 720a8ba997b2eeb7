"""Runs of many seeds add up, whatever the number of processes, and a dead process is an error."""

import os

import pytest

from tests.simulation import __main__ as command
from tests.simulation import parallel
from tests.simulation.parallel import Chunk, Failure, Tally, WorkerDied


def counted(chunk: Chunk) -> Tally:
    """A worker that runs nothing; seeds that end in 7 fail."""
    seeds = range(chunk.first, chunk.first + chunk.seeds)
    tally = Tally(seeds=chunk.seeds, met={"met": chunk.seeds}, checks={"1": 2 * chunk.seeds})
    tally.failures = [Failure(seed, "told", "story", "again") for seed in seeds if seed % 10 == 7]
    return tally


def dying(chunk: Chunk) -> Tally:
    if chunk.first == 20:
        os._exit(9)
    return counted(chunk)


def test_every_seed_is_in_one_chunk_and_every_process_has_a_share():
    for seeds, jobs in ((1, 1), (7, 2), (60, 2), (1000, 3)):
        work = parallel.chunks(Chunk(100, seeds), jobs)
        numbers = [n for c in work for n in range(c.first, c.first + c.seeds)]
        assert numbers == list(range(100, 100 + seeds))
        assert len(work) >= min(seeds, jobs)


def test_the_sum_is_the_same_over_one_process_and_over_two():
    sums = []
    for jobs in (1, 2):
        total = Tally()
        for tally in parallel.run_all([Chunk(n, 3) for n in (0, 3, 10)], jobs, counted):
            total.add(tally)
        sums.append(total)
    assert sums[0] == sums[1]
    assert (sums[0].seeds, sums[0].judged, sums[0].met) == (9, 18, {"met": 9})


def test_the_lowest_failing_seed_is_told_and_nothing_after_it_is_run():
    work = [Chunk(n, 4) for n in (0, 4, 8, 12, 16)]
    told = [t.failures[0].seed for t in parallel.run_all(work, 2, counted) if t.failures]
    assert told == [7]


def test_a_run_that_goes_on_tells_every_failing_seed():
    work = [Chunk(n, 4, keep_going=True) for n in (0, 4, 8, 12, 16)]
    failures = [f.seed for t in parallel.run_all(work, 2, counted) for f in t.failures]
    assert failures == [7, 17]


def test_a_process_that_dies_is_an_error_that_names_its_seeds():
    work = [Chunk(n, 2, keep_going=True) for n in (10, 20, 30)]
    with pytest.raises(WorkerDied, match="20-21"):
        list(parallel.run_all(work, 2, dying))


def test_ten_thousand_seeds_that_meet_too_little_are_too_tame():
    tame = command._too_tame(Tally(seeds=command.TAME))
    assert tame
    assert command._too_tame(Tally(seeds=command.TAME - 1)) == []


def test_a_clean_run_exits_with_0_and_says_what_it_was(capsys):
    assert command.main(["--seeds", "2", "--start", "3"]) == 0
    told = capsys.readouterr().out
    assert "2 seeds: 0 failed" in told
    assert "entries appended" in told
