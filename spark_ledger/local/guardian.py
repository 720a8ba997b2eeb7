"""Runs one command and ends it when the parent has died: `guardian.py [--delete FOLDER] -- CMD`.

Always true: the command does not outlive this process: on Linux the kernel ends the command even
when this process is killed. This process ends when its standard input is closed, which the kernel
does when the parent dies. SIGTERM is passed on to the command. FOLDER is deleted only if the parent
died. This file imports no file of the project: it is run with `python -I -S`, to start fast and
stay small.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
DELETE_TRIES, DELETE_PAUSE_S = 50, 0.1


def main(arguments: list[str]) -> int:
    dashes_at = arguments.index("--")
    options, command = arguments[:dashes_at], arguments[dashes_at + 1 :]
    folder = options[1] if options[:1] == ["--delete"] else None
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=_death_signal_setter()
    )
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    orphaned = threading.Event()
    threading.Thread(target=_watch_parent, args=(child, orphaned), daemon=True).start()
    status = child.wait()
    if orphaned.is_set() and folder:
        _delete(folder)
    return status


def _death_signal_setter() -> "Callable[[], None] | None":
    """A function that the child calls before it becomes the command. The function asks the kernel
    to kill the child when this process dies."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def set_death_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return set_death_signal


def _watch_parent(child: "subprocess.Popen[bytes]", orphaned: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    orphaned.set()
    child.kill()


def _delete(folder: str) -> None:
    """Delete the folder; try again for some seconds, because processes that are about to end may
    still write into it."""
    for _ in range(DELETE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(DELETE_PAUSE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
