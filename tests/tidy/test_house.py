"""The house: rooms, the floors they are on, and how many files a room holds.

Always true: an import goes down. Rooms on one floor do not know of each other. So no circle exists
between rooms; `test_no_two_rooms_import_each_other` looks for one in what the files import,
whatever the floors say. Nor between files, of one room or of several:
`test_no_file_imports_itself_through_others` counts every import, also those within functions and
under TYPE_CHECKING: an import that only annotates counts because a reader of the file needs the
other file all the same.
"""

import ast
from collections.abc import Collection, Iterator, Mapping

import pytest

from tests.tidy.sources import PACKAGES, Source, below, sources

FILES_MAX = 15
FLOORS = {
    "bookie_server": """
        __main__
        serve
        bookie
        add
        reclaim start
        ledgers
        storage
        journal logs
        disk
        config
        lanes
        api
    """,
    "spark_ledger": """
        notebook
        cli
        local
        client
        broker spark
        topic
        process
        repair
        ledger
        bookies
        metadata
        config
        errors http metrics net rates units
        async_tasks
    """,
    "spark_ledger.topic": """
        upkeep
        blocking parts views
        task_reader
        client
        subscription values
        read
        acks
        commit
        write
        checkpointer schema
        log
        entry
    """,
    "spark_ledger.broker": """
        server
        serve
        admin
        broker
        nonpersistent topic_lists
        catalog watch
        store_contact
        owner
        dispatch produce
        log
        limits names schemas settings
        wire
    """,
    "spark_ledger.spark": """
        daemon jobs
        session
        data_source
        read write
        rows
        options
        worker spark_version
    """,
}
"""By package its rooms (folders and single files), the highest floor first."""


def floors(package: str) -> dict[str, int]:
    """The height of each room."""
    lines = [line.split() for line in FLOORS[package].split("\n") if line.strip()]
    return {room: -floor for floor, rooms in enumerate(lines) for room in rooms}


def room_of(module: str, package: str) -> str | None:
    """The part of `module` right below `package`; None outside of it and for the package itself."""
    if not below(module, package) or module == package:
        return None
    return module[len(package) + 1 :].partition(".")[0]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_between(package: str) -> Iterator[tuple[str, str, str]]:
    """(room, other room, where) of each import from one room of the package in another."""
    known = {module_of(source.path) for source in sources(*PACKAGES)}
    for source in sources(package.replace(".", "/")):
        room = room_of(module_of(source.path), package)
        for module, line in source.imports:
            while module and module not in known:
                module = module.rpartition(".")[0]  # `from a import b`: b may be no module
            other = room_of(module, package)
            if room and other and other != room:
                yield room, other, f"{source.path}:{line} imports {module}"


def imported(source: Source, modules: Collection[str]) -> set[str]:
    """The modules that the file imports anywhere in it. A package counts for nothing: `from a
    import b` names the package only on the way to module b."""
    packages = {module.rpartition(".")[0] for module in modules}
    return {name for name, _ in source.imports if name in modules and name not in packages}


def in_circles(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Those that import themselves, directly or through others."""
    circles = []
    for start in sorted(edges):
        reached, ahead = set(), sorted(edges[start])
        while ahead:
            name = ahead.pop()
            if name not in reached:
                reached.add(name)
                ahead += sorted(edges.get(name, ()))
        if start in reached:
            circles.append(start)
    return circles


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_has_a_floor(package):
    folder = package.replace(".", "/")
    rooms = {room_of(module_of(source.path), package) for source in sources(folder)}
    assert rooms - {None} == set(floors(package))


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_down(package):
    height = floors(package)
    found = [where for a, b, where in imports_between(package) if height[a] <= height[b]]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", FLOORS)
def test_no_two_rooms_import_each_other(package):
    edges: dict[str, set[str]] = {}
    for room, other, _ in imports_between(package):
        edges.setdefault(room, set()).add(other)
    assert not in_circles(edges)


def test_no_file_imports_itself_through_others():
    modules = {module_of(source.path): source for source in sources(*PACKAGES)}
    edges = {module: imported(source, modules) for module, source in modules.items()}
    assert not in_circles(edges)


def test_a_circle_of_files_is_found_behind_an_import_within_a_function_or_for_types_alone():
    texts = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b import B",
        "b": "def lazily():\n    from c import decode",
        "c": "import a",
        "d": "from a import A",
    }
    files = {name: Source(f"{name}.py", text, ast.parse(text)) for name, text in texts.items()}
    edges = {name: imported(file, files) for name, file in files.items()}
    assert in_circles(edges) == ["a", "b", "c"]


def test_no_folder_holds_more_files_than_a_reader_keeps_in_mind():
    counts: dict[str, int] = {}
    for source in sources(*PACKAGES):
        folder, _, name = source.path.rpartition("/")
        counts[folder] = counts.get(folder, 0) + (name != "__init__.py")
    assert not {folder: count for folder, count in counts.items() if count > FILES_MAX}


def test_the_storage_node_knows_of_the_client_only_metadata_and_ground_rooms():
    ground = ("async_tasks", "errors", "metrics", "net", "rates", "units")
    allowed = ("spark_ledger.metadata", *(f"spark_ledger.{room}" for room in ground))
    found = [
        f"{source.path}:{line} imports {module}"
        for source in sources("bookie_server")
        for module, line in source.imports
        if below(module, "spark_ledger")
        and module != "spark_ledger"
        and not any(below(module, room) for room in allowed)
    ]
    assert not found, "\n".join(found)
