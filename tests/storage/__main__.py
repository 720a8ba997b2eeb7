"""Numbered cases, on every core: python -m tests.storage --cases 20000 --start 0 [--jobs 2]

    python -m tests.storage --seed 17        one case again, and if it fails, a smaller one
    python -m tests.storage --case 00000000…  the case of these bytes, as a failure prints it

Prints how many cases ran in a second; the first failure, made small, ends it with exit 1.
"""

import argparse
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator

from tests.storage.case import Ran, case_of, run_case
from tests.storage.operations import operations
from tests.storage.shrink import failure_of, shrunk

CHUNK = 50


def main() -> int:
    options = _parser().parse_args()
    logging.disable(logging.CRITICAL)  # nodes say what they lost, and lose something every second
    if options.case is not None:
        return _one(bytes.fromhex(options.case))
    if options.seed is not None:
        return _one(case_of(options.seed))
    return _many(options.start, options.cases, options.jobs or os.cpu_count() or 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="0: one for each core")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--case")
    return parser


def _one(case: bytes) -> int:
    failure = failure_of(case)
    if failure is None:
        print("passed")
        return 0
    small = shrunk(case)
    failure = failure_of(small) or failure
    print("".join(traceback.format_exception(failure)))
    print("\n".join(map(str, operations(small))))
    print(f"{failure!r}\npython -m tests.storage --case {small.hex()}")
    return 1


def _many(start: int, cases: int, jobs: int) -> int:
    started, ran = time.perf_counter(), [Ran(0, 0, 0, 0.0)]
    for failed, sums in _run(start, cases, jobs):
        ran.append(sums)
        if failed is not None:
            print(f"seed {failed} failed: python -m tests.storage --seed {failed}")
            return _one(case_of(failed))
    seconds = time.perf_counter() - started
    total = Ran(*map(sum, zip(*ran, strict=True)))
    print(
        f"{cases} cases passed (seeds {start} to {start + cases - 1}):"
        f" {cases / seconds:.0f} cases/s on {jobs} cores, {cases / total.cpu_s:.0f} in a second of"
        f" one core; a case has {total.operations / cases:.1f} operations,"
        f" {total.crashes / cases:.1f} crashes, {total.judged / cases:.0f} answers judged"
    )
    return 0


def _run(start: int, cases: int, jobs: int) -> Iterator[tuple[int | None, Ran]]:
    chunks = [
        range(first, min(first + CHUNK, start + cases))
        for first in range(start, start + cases, CHUNK)
    ]
    if jobs == 1:
        yield from map(run_chunk, chunks)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


def run_chunk(seeds: range) -> tuple[int | None, Ran]:
    """The seed that failed, if one did, and the sums of what ran."""
    logging.disable(logging.CRITICAL)
    ran = [Ran(0, 0, 0, 0.0)]
    for seed in seeds:
        try:
            ran.append(run_case(case_of(seed)))
        except Exception:
            return seed, ran[0]
    return None, Ran(*map(sum, zip(*ran, strict=True)))


if __name__ == "__main__":
    raise SystemExit(main())
