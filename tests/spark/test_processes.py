"""What `ps` shows of a cluster and of a query is what docs/architecture.md says."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from spark_ledger.local import background, processes
from spark_ledger.local.processes import LocalAutorecovery, free_port
from tests.crash.procfs import command_line, descendants
from tests.spark.topics import wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| `(?P<command>[^`]+)` \| [^|]+ \|$", re.MULTILINE)


def documented() -> dict[str, re.Pattern[str]]:
    """The command lines of the page's table; `...` there is any text."""
    section = PAGE.read_text().split("\n## What `ps` shows\n")[1].split("\n## ")[0]
    commands = [row["command"] for row in ROW.finditer(section)]
    return {one: re.compile(".*".join(map(re.escape, one.split("...")))) for one in commands}


def shown(pid: int) -> str:
    """Its command line, with the program's name for its path; nothing for one that has ended."""
    program, *arguments = command_line(pid).decode().split("\0")
    name = re.sub(r"^python3[.\d]*$", "python", Path(program).name)
    return " ".join([name, *arguments]).strip()


@pytest.fixture
def up(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "subprocess", subprocess)  # a fork has the tests' command line
    here = background.up(tmp_path / "cluster", bookies=2, broker_port=free_port())
    beside = LocalAutorecovery(tmp_path / "autorecovery.log", here.service_url)  # as bookies do
    beside.start()
    yield here
    beside.stop()
    background.down(tmp_path / "cluster")


def test_each_process_of_a_cluster_and_of_a_query_is_told_by_its_command_line(
    spark, topics, topic, keyed, tmp_path, up
):
    topics.write(keyed(10), topic)
    rows = topics.stream(topic, startingOffsets="earliest").select("key", "value")
    query = topics.start_copy(rows, f"{topic}-copy", tmp_path / "checkpoint", once=False)
    try:
        wait_until(lambda: query.lastProgress and query.lastProgress["numInputRows"] == 10)
        found = {shown(pid) for root in (up.pid, os.getpid()) for pid in descendants(root)}
        found |= {shown(up.pid)}
    finally:
        query.stop()
    found = {one for one in found if "tests.kit.commands" not in one}
    ours = {one for one in found if one.startswith("python ") or "zookeeper" in one}
    told = documented()
    meant = {one: [name for name, like in told.items() if like.fullmatch(one)] for one in ours}
    assert {one: names for one, names in meant.items() if len(names) != 1} == {}
    assert {name for names in meant.values() for name in names} == set(told)
