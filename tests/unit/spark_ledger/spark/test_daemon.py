"""PySpark's daemon loads what its workers need, and nothing that harms a fork."""

import subprocess
import sys

import pytest

from spark_ledger.spark import daemon

LOOKS = """
import gc, os, sys, threading
import pyspark.daemon

def look():
    missing = [name for name in {wanted} if name not in sys.modules]
    there = [name for name in ("grpc", "pandas") if name in sys.modules]
    print(missing, there, threading.active_count(), gc.get_freeze_count() > 10_000)
    print(open_files() - before)

def open_files():
    return {{os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{{fd}}")}}

before = open_files()
pyspark.daemon.manager = look
from spark_ledger.spark import daemon
sys.argv = ["daemon", *sys.argv[1:]]
{before}
daemon.main()
"""


def run(*roles: str, wanted: tuple[str, ...] = daemon.MODULES, before: str = "") -> list[str]:
    code = LOOKS.format(wanted=wanted, before=before)
    command = [sys.executable, "-c", code, *roles]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("role", "there"),
    [("pyspark.worker", ["pandas"]), ("pyspark.sql.worker.plan_data_source_read", [])],
)
def test_workers_find_their_modules_loaded_and_no_thread_and_no_open_file(role, there):
    said, opened = run(role, wanted=(*daemon.MODULES, role))
    assert said == f"[] {there} 1 True"
    assert opened == "set()"


def test_without_a_role_its_workers_are_those_of_tasks():
    said, _ = run(wanted=(*daemon.MODULES, "pyspark.worker"))
    assert said == "[] ['pandas'] 1 True"


def test_what_cannot_be_loaded_is_left_to_the_worker():
    lacking = "daemon.MODULES = ('no_such_module', *daemon.MODULES)"
    said, _ = run("pyspark.worker", before=lacking)
    assert said == "[] ['pandas'] 1 True"
    said, _ = run("no.such.role")
    assert said == "[] [] 1 True"


LEAVES = """
import pyspark.daemon

def leaves(sock, authenticated):
    raise {error}("of it")

def forks():
    print(pyspark.daemon.worker(None, True))

pyspark.daemon.worker, pyspark.daemon.manager = leaves, forks
from spark_ledger.spark import daemon
daemon.main()
"""


def test_a_worker_whose_connection_spark_closed_ends_without_a_word():
    command = [sys.executable, "-c", LEAVES.format(error="BrokenPipeError")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{daemon.EXIT_NOT_REUSED}\n", "")


def test_what_else_befalls_a_worker_is_told():
    command = [sys.executable, "-c", LEAVES.format(error="ValueError")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and "ValueError: of it" in done.stderr
