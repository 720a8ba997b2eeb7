"""The background loop and what importing the package brings along."""

import asyncio
import os
import subprocess
import sys

import pytest

from spark_ledger.process import background_loop


def test_a_coroutine_runs_on_the_loop_and_its_result_comes_back():
    async def work():
        return asyncio.get_running_loop() is background_loop().loop

    assert background_loop().run(work())
    assert background_loop() is background_loop()


def test_an_error_comes_back_as_itself():
    async def work():
        raise LookupError("this one")

    with pytest.raises(LookupError, match="this one"):
        background_loop().run(work())


def test_blocking_on_the_loops_own_thread_is_refused_instead_of_hanging():
    async def work():
        background_loop().run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own event loop"):
        background_loop().run(work())


def test_a_forked_child_has_a_loop_of_its_own_and_the_parents_refuses_it():
    parents = background_loop()
    child = os.fork()
    if child == 0:
        try:
            parents.run(asyncio.sleep(0))
        except RuntimeError:
            background_loop().run(asyncio.sleep(0))
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_importing_the_package_and_its_client_loads_neither_pyspark_nor_grpc():
    code = (
        "import sys; from spark_ledger import LedgerClient;"
        "print([m for m in ('pyspark', 'grpc', 'kazoo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_does_not_exist_is_an_attribute_error():
    import spark_ledger

    with pytest.raises(AttributeError, match="no attribute 'LedgerClients'"):
        _ = spark_ledger.LedgerClients
