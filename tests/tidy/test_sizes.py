"""A file or function over the limit lacks a noun. Generated files are exempt."""

import ast
import statistics

from tests.tidy.sources import OTHERS, PACKAGES, sources

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60


def test_no_file_is_longer_than_the_limit():
    lines = {source.path: source.text.count("\n") for source in sources(*PACKAGES, *OTHERS)}
    print(f"\nfiles: {len(lines)}, median {statistics.median(lines.values()):.0f} lines")
    over = {path: count for path, count in lines.items() if count > FILE_LINES_MAX}
    assert not over


def test_no_function_is_longer_than_the_limit():
    lines = {
        f"{source.path}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for source in sources(*PACKAGES, *OTHERS)
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    print(f"\nfunctions: {len(lines)}, median {statistics.median(lines.values()):.0f} lines")
    over = {name: count for name, count in lines.items() if count > FUNCTION_LINES_MAX}
    assert not over
