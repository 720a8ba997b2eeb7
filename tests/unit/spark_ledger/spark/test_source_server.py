"""The source of a streaming query is forked from what has everything loaded, and is otherwise as if
Spark had started it. This process stands for Spark's JVM: it starts the daemon, and who asks."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_ledger.spark import source_server

pytestmark = pytest.mark.skipif(not source_server.AVAILABLE, reason="Linux has abstract sockets")

DAEMON = """
import sys
from spark_ledger.spark import source_server
source_server.RUNNER, source_server.PATIENCE_S = "the_runner", 60
sys.loaded_once = True
asked = source_server.serve_beside()
if asked is not None:
    asked.work()
else:
    print("serves", flush=True)
    sys.stdin.read()
"""
RUNNER = """
import json, os, signal, sys
def terminated(number, frame):
    print("terminated", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, terminated)
print(json.dumps({
    "pid": os.getpid(), "forked": hasattr(sys, "loaded_once"), "arguments": sys.argv[1:],
    "folder": os.getcwd(), "told": os.environ.get("SPARK_TOLD"), "name": __name__,
    "variables": sorted(os.environ),
}), flush=True)
print(sys.stdin.read(), flush=True)
print("to the other", file=sys.stderr)
"""
ASKS = """
import sys
from spark_ledger.spark import source_process, source_server
source_process.RUNNER = source_server.RUNNER = "the_runner"
source_server.PATIENCE_S = 60
source_process.main()
"""
BELOW_ANOTHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "the_runner.py").write_text(RUNNER, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "SPARK_TOLD": "of the daemon"}


@pytest.fixture
def daemon(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with start(DAEMON, environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serves\n"
            wait_for_the_server()
            yield process
        finally:
            process.kill()
            wait_for_the_server(there=False)


def wait_for_the_server(*, there: bool = True) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if (probe.connect_ex(source_server.address(os.getpid())) == 0) is there:
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(
    code: str, environment: dict[str, str], *arguments: str, cwd: Path | None = None
) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=cwd, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    )


def begun(process: subprocess.Popen[str]) -> dict[str, object]:
    """What the runner says when it begins."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())  # type: ignore[no-any-return]


def gone(pid: object) -> bool:
    """Awaited through a handle of the process, which is no child of ours."""
    assert isinstance(pid, int)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    return bool(ready)


def test_a_source_is_forked_and_has_what_its_asker_was_started_with(daemon, environment, tmp_path):
    told = {**environment, "SPARK_TOLD": "for this one", "PYTHON_WORKER_FACTORY_PORT": "1"}
    with start(ASKS, told, "a", "b c", cwd=tmp_path) as process:
        said = begun(process)
        assert said.pop("pid") != process.pid
        assert said == {
            "forked": True,
            "arguments": ["a", "b c"],
            "folder": str(tmp_path),
            "told": "for this one",
            "name": "__main__",
            "variables": sorted(told),
        }
        assert process.communicate("in") == ("in\n", "to the other\n")
        assert process.returncode == 0


def test_several_sources_are_there_at_once(daemon, environment):
    with start(ASKS, environment) as one, start(ASKS, environment) as other:
        first, second = begun(one), begun(other)
        assert first["forked"] and second["forked"] and first["pid"] != second["pid"]
        one.communicate("")
        assert other.poll() is None
        other.communicate("")


def test_a_signal_to_end_reaches_the_source(daemon, environment):
    with start(ASKS, environment) as process:
        begun(process)
        process.send_signal(signal.SIGTERM)
        assert process.communicate() == ("terminated\n", "")


def test_a_source_ends_when_its_asker_was_killed(daemon, environment):
    with start(ASKS, environment) as process:
        said = begun(process)
        process.kill()
        assert gone(said["pid"])


def test_the_server_waits_for_what_it_forked(daemon, environment):
    with start(ASKS, environment) as process:
        said = begun(process)
        process.communicate("")
    deadline = time.monotonic() + 60
    while source_server.parent_of(int(said["pid"])):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LD_LIBRARY_PATH", "TZ"])
def test_another_environment_is_another_start(daemon, environment, name):
    with start(ASKS, {**environment, name: "1"}) as process:
        said = begun(process)
        assert not said["forked"] and said["pid"] == process.pid
        assert process.communicate("in")[0] == "in\n"


def test_who_is_not_of_the_same_jvm_does_the_work_itself(daemon, environment):
    with start(BELOW_ANOTHER, environment, ASKS) as process:
        assert not begun(process)["forked"]
        process.communicate("")


def test_where_no_server_is_the_asker_does_the_work_itself(environment):
    with start(ASKS, environment) as process:
        said = begun(process)
        assert not said["forked"] and said["pid"] == process.pid
        assert said["name"] == "__main__"
        process.communicate("")


def test_one_server_is_enough_and_another_daemon_goes_on_without(daemon, environment):
    with start(DAEMON, environment) as other:
        assert other.stdout is not None and other.stdout.readline() == "serves\n"
        other.communicate("")
    with start(ASKS, environment) as process:
        assert begun(process)["forked"]
        process.communicate("")


def test_the_server_ends_with_its_daemon_and_leaves_its_sources_alone(daemon, environment):
    with start(ASKS, environment) as process:
        said = begun(process)
        server = source_server.parent_of(int(said["pid"]))
        daemon.kill()
        assert gone(server)
        assert process.communicate("in") == ("in\n", "to the other\n")


def test_what_spark_sets_for_each_process_makes_no_other_start():
    told = {"PATH": "/bin", "PYTHONPATH": "a", "PYTHON_WORKER_FACTORY_PORT": "1", "_": "x"}
    assert source_server.same_start(told, {"PATH": "/bin", "PYTHONPATH": "a", "SPARK_X": "y"})
    assert source_server.same_start({"PYTHONPATH": "a:b"}, {"PYTHONPATH": "a:b:a"})
    assert not source_server.same_start({"PYTHONPATH": "a:b"}, {"PYTHONPATH": "b:a"})
    assert not source_server.same_start(told, {**told, "PYTHONPATH": "b"})
    assert not source_server.same_start(told, {**told, "LANG": "C"})
