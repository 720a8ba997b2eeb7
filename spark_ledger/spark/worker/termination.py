"""What is done before a source's process ends by SIGTERM: so Spark ends it when its query stops.

Always true: the process ends by the signal all the same, once what is to be done before is done or
has failed; the same signal again changes nothing (Spark sends it twice, one right after the other).
Where other code handles the signal, or in a thread that may not, nothing is changed. A forked
child has nothing to do of what its parent has. What is done ends by itself in seconds.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_before: dict[Callable[[], None], int] = {}  # and by which process that is to be done

_log = logging.getLogger(__name__)


def before_termination(do: Callable[[], None]) -> None:
    """`do` it, once, in the main thread, wherever that is then: it may take no lock that this
    thread holds elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    _before[do] = os.getpid()


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    for do, pid in _before.items():
        try:
            if pid == os.getpid():
                do()
        except Exception as error:  # no caller is left to get it
            _log.warning("before the end of the process: %r", error)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
