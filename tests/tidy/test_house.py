"""The house: rooms, the floors they are on, and how many files a room holds.

Always true: an import goes down. Rooms on one floor do not know of each other. So no circle exists
between rooms; `test_no_two_rooms_import_each_other` looks for one in what the files import,
whatever the floors say.
"""

from collections.abc import Iterator

import pytest

from tests.tidy.sources import PACKAGES, below, sources

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
        demo
        local
        client
        broker spark
        repair
        topic
        process
        ledger
        bookies
        metadata
        config
        errors net
    """,
    "spark_ledger.topic": """
        upkeep
        blocking parts views
        task_reader
        client
        subscription
        read
        commit
        write
        checkpointer schema
        log
        entry
    """,
    "spark_ledger.broker": """
        server
        serve
        broker
        settings
        owned_topic
        owned_partition
        dispatch produce
        owner
        names
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
    circles = []
    for start in sorted(edges):
        reached, ahead = set(), sorted(edges[start])
        while ahead:
            room = ahead.pop()
            if room not in reached:
                reached.add(room)
                ahead += sorted(edges.get(room, ()))
        if start in reached:
            circles.append(start)
    assert not circles


def test_no_folder_holds_more_files_than_a_reader_keeps_in_mind():
    counts: dict[str, int] = {}
    for source in sources(*PACKAGES):
        folder, _, name = source.path.rpartition("/")
        counts[folder] = counts.get(folder, 0) + (name != "__init__.py")
    assert not {folder: count for folder, count in counts.items() if count > FILES_MAX}


def test_the_storage_node_knows_of_the_client_only_metadata_errors_and_net():
    allowed = ("spark_ledger.metadata", "spark_ledger.errors", "spark_ledger.net")
    found = [
        f"{source.path}:{line} imports {module}"
        for source in sources("bookie_server")
        for module, line in source.imports
        if below(module, "spark_ledger")
        and module != "spark_ledger"
        and not any(below(module, room) for room in allowed)
    ]
    assert not found, "\n".join(found)
