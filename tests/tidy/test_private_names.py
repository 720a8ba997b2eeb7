"""Tests look at what the product shows: they reach for few of its private names.

Counted are names with one underscore that the product defines and no test does, where a test takes
one of an object other than its own, or replaces it. The simulator's bugs patch on purpose.
"""

import ast
from collections.abc import Iterator

from tests.tidy.sources import Source, sources

REACHED_MAX = 40
"""Each is of a kind that nothing public shows: what is held in memory and must not be, or the
moment within a step at which something else happens. Lower it when one goes."""
PATCHES_ON_PURPOSE = ("tests/simulation/mutants/", "tests/simulation/exhaustive/topics/mutants.py")
OWN = ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(source: Source) -> Iterator[str]:
    """Private names of functions, classes, variables and attributes that the source makes."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in OWN:
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def reached(source: Source) -> Iterator[tuple[int, str]]:
    """Where the source takes or replaces a private name of something else."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in OWN):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, each.name) for each in node.names if is_private(each.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from ((node.lineno, str(name)) for name in names if is_private(str(name)))


def test_tests_reach_for_few_private_names_of_the_product():
    product = {
        n for part in ("bookie_server", "spark_ledger") for s in sources(part) for n in defined(s)
    }
    tests = [one for one in sources("tests") if not str(one.path).startswith(PATCHES_ON_PURPOSE)]
    only_there = product.difference(*map(defined, tests))
    found = [
        f"{one.path}:{line} {name}"
        for one in tests
        for line, name in reached(one)
        if name in only_there
    ]
    print("\n".join(found))
    assert len(found) <= REACHED_MAX
