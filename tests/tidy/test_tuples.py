"""A tuple with three or more members that leaves its function has names for them.

Always true: a function's annotation and a module's alias name no such tuple, but for those listed
here with their reasons. A NamedTuple takes about 0.4 us to make, a tuple 0.05 us.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.sources import PACKAGES, Source, sources

MEMBERS_MAX = 2
HOT = "made for each field, entry or message of a hot path"
KEY = "a key to compare or to sort by, which nothing takes apart"
EXCEPTIONS = {
    ("bookie_server/api/codec.py", "next_field"): HOT,
    ("bookie_server/api/entry.py", "identity"): KEY,
    ("bookie_server/logs/entry_log.py", "_chunks"): HOT,
    ("bookie_server/reclaim/compact.py", "_living"): HOT,
    ("bookie_server/storage/directories.py", "Entries"): HOT,
    ("bookie_server/storage/write_cache.py", "to_write"): HOT,
    ("spark_ledger/broker/wire/frames.py", "Span"): HOT,
    ("spark_ledger/ledger/placement.py", "_objections"): KEY,
    ("spark_ledger/spark/options/limits.py", "by_wait"): KEY,
}


def unnamed_tuples(source: Source) -> Iterator[tuple[str, str]]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            if _has_tuple(node.returns):
                yield source.path, node.name
        elif isinstance(node, ast.Assign) and node in source.tree.body and _has_tuple(node.value):
            yield source.path, ast.unparse(node.targets[0])


def _has_tuple(annotation: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Subscript)
        and ast.unparse(node.value) == "tuple"
        and isinstance(node.slice, ast.Tuple)
        and len(node.slice.elts) > MEMBERS_MAX
        for node in ast.walk(annotation)
    )


def test_a_tuple_of_three_that_leaves_its_function_has_names_for_its_members():
    unnamed = {place for source in sources(*PACKAGES) for place in unnamed_tuples(source)}
    assert unnamed == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def act() -> list[tuple[int, int, int]]: ...", 1),
        ("def act() -> tuple[int, ...] | tuple[int, str]: ...", 0),
        ("Place = tuple[str, int, int]", 1),
        ("def act():\n    places: list[tuple[str, int, int]] = []", 0),
    ],
)
def test_a_tuple_is_noticed_in_a_returned_annotation_and_an_alias(text, count):
    assert len(list(unnamed_tuples(Source("x.py", text, ast.parse(text))))) == count
