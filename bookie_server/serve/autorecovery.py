"""The process that a bookie hosts beside itself to heal the cluster and keep up its topics: adds
never wait for it.

Always true: there is one at a time, and none after `hosted` is left; it ends with the bookie,
whatever that dies of, for it holds the reading end of a pipe; one that ends by itself is started
again, later each time.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator

PAUSE_S, PAUSE_MAX_S, LASTED_S = 1.0, 60.0, 60.0
STOP_TIMEOUT_S = 5.0

log = logging.getLogger("bookie_server")


@contextlib.asynccontextmanager
async def hosted(service_url: str, *, wanted: bool) -> AsyncIterator[None]:
    """It runs inside of this, if it is `wanted`; its log is the bookie's."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "spark_ledger.cli.main", "autorecovery", "start"]
    command += ["--parent-pipe", "--service-url", service_url]
    hosting = asyncio.create_task(host(command))
    try:
        yield
    finally:
        hosting.cancel()
        await asyncio.gather(hosting, return_exceptions=True)


async def host(command: list[str], pause_s: float = PAUSE_S) -> None:
    """Run it again and again, until cancelled."""
    now = asyncio.get_running_loop().time
    wait_s = pause_s
    while True:
        began_s = now()
        ended = await _run(command)
        if now() - began_s >= LASTED_S:
            wait_s = pause_s
        log.warning("the process of autorecovery %s; it is started again in %g s", ended, wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, PAUSE_MAX_S)


async def _run(command: list[str]) -> str:
    """How it ended."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as failure:
        return f"cannot be started: {failure}"
    try:
        return f"ended with exit status {await process.wait()}"
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """In good order: its session in the metadata store ends with it."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
