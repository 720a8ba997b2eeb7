"""The project's own Python files, parsed once, for the rules of this folder."""

import ast
import functools
import gc
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bookie_server", "spark_ledger", "spark_ledger_demo", "pyspark_ledger")
OTHERS = ("tests", "benchmarks", "scripts", "notebooks", "examples")


@dataclass(frozen=True)
class Source:
    path: str
    """Relative to the repository, with slashes."""
    text: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> tuple[tuple[str, int], ...]:
        """Every module imported anywhere in the file, with its line; relative ones resolved."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[str, int]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                yield from ((name, node.lineno) for name in self._imported_from(node))

    def _imported_from(self, node: ast.ImportFrom) -> Iterator[str]:
        base = node.module or ""
        if node.level:
            package = self.path.removesuffix(".py").split("/")[: -node.level]
            base = ".".join([*package, base] if base else package)
        yield base
        for alias in node.names:  # `from a import b`: b may be a module
            yield f"{base}.{alias.name}"


def is_generated(path: str) -> bool:
    return path.endswith(("_pb2.py", "_pb2_grpc.py"))


@functools.cache
def tracked_files() -> tuple[str, ...]:
    """Files that are, or are about to be, part of the repository, in order."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(sorted(path for path in listed.stdout.split("\n") if (ROOT / path).is_file()))


@functools.cache
def source(path: str) -> Source:
    text = (ROOT / path).read_text()
    return Source(path, text, ast.parse(text))


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The hand-written Python files below the folders (default: of the packages)."""
    wanted = tuple(f"{folder}/" for folder in folders or PACKAGES)
    paths = [path for path in tracked_files() if path.endswith(".py") and path.startswith(wanted)]
    gc.disable()  # trees are millions of objects, and none of them is garbage
    try:
        return tuple(source(path) for path in paths if not is_generated(path))
    finally:
        gc.freeze()
        gc.enable()


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
