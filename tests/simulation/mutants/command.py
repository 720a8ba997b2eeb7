"""`python -m tests.simulation mutants`: whether each known bug is caught, and after how many
seeds. Exits with 1 if one is not."""

import argparse
import json
import sys
import time

from tests.simulation.asked import at_least
from tests.simulation.mutants import MUTANTS
from tests.simulation.mutants.mutant import SEEDS_FILE, stored_seeds
from tests.simulation.mutants.search import Found, search_all
from tests.simulation.replay import mutants_like

STARTS = 3


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation mutants", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of {name, caught, seeds}")
    parser.add_argument(
        "--seeds-max", type=at_least(0), default=2000, help="seeds tried in one search"
    )
    parser.add_argument(
        "--starts", type=at_least(1), default=STARTS, help="searches for each mutant"
    )
    parser.add_argument(
        "--name",
        default="",
        help="only mutants of this name or report (BK#2614, D1), or that contain it",
    )
    parser.add_argument("--jobs", type=at_least(1), default=2, help="processes")
    parser.add_argument("--refresh", action="store_true", help="store the seeds for make test")
    parser.add_argument("--plain", action="store_true", help="in runs just as seeds draw them")
    options = parser.parse_args(arguments)
    if options.plain and options.refresh:
        parser.error("stored seeds are those of the mutants' own plans, not of --plain")
    try:
        chosen = mutants_like(options.name)
    except ValueError as error:
        print(f"error: --name: {error}", file=sys.stderr)
        return 2
    begun, found = time.perf_counter(), []
    if not options.json:
        print(_line("mutant", "report", "invariant", "caught", "seeds", "first seed"), flush=True)
    how = (options.seeds_max, options.starts, options.jobs, options.plain)
    for one in search_all(chosen, *how):
        found.append(one)
        if not options.json:
            print(_row(one), flush=True)
    if options.refresh:
        _store(found)
    if options.json:
        told = [{"name": f.mutant.name, "caught": f.caught, "seeds": f.seeds} for f in found]
        print(json.dumps(told, indent=2))
    else:
        caught = sum(one.caught for one in found)
        print(f"{caught} of {len(found)} caught, {time.perf_counter() - begun:.0f} s")
    return 0 if found and all(one.caught for one in found) else 1


def _row(found: Found) -> str:
    invariants = dict.fromkeys(s.invariant for s in found.searches if s.seed is not None)
    clean = all(search.clean for search in found.searches)
    caught = "yes" if found.caught else "no" if clean else "NOT CLEAN"
    if any(search.broken for search in found.searches):
        caught = "BROKEN"
    first = found.searches[0].seed
    return _line(
        found.mutant.name,
        found.mutant.report,
        " ".join(invariants),
        caught,
        f"{found.seeds} ({' '.join(str(search.seeds) for search in found.searches)})",
        "-" if first is None else str(first),
    )


def _line(name: str, report: str, invariant: str, caught: str, seeds: str, first: str) -> str:
    return f"{name:42} {report:12} {invariant:12} {caught:10} {seeds:22} {first}"


def _store(found: list[Found]) -> None:
    """Keep for each mutant the seed that is cheapest to replay."""
    known = stored_seeds()
    for one in found:
        search = one.cheapest
        if search is not None:
            what = {"seed": search.seed, "invariant": search.invariant, "seeds": one.seeds}
            known[one.mutant.name] = what
    names = [mutant.name for mutant in MUTANTS]
    kept = {name: known[name] for name in names if name in known}
    lines = [f"  {json.dumps(name)}: {json.dumps(what)}" for name, what in kept.items()]
    SEEDS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
