"""What is done before a process ends by SIGTERM, in processes of their own."""

import signal
import subprocess
import sys

READY = b"ready\n"
BEGIN = """
import os, signal, threading, time
from spark_ledger.spark.worker import call_before_termination

def say(text):
    os.write(1, text.encode() + b"\\n")

def fail():
    raise ValueError("no use")
"""
WAIT = """
say("ready")
while True:
    time.sleep(0.01)  # a signal that comes just before a call that waits for ever is not seen
"""


def said_and_status(*lines: str) -> tuple[bytes, int]:
    """What a process says after it was told to end, and how it ended."""
    script = "\n".join([BEGIN, *lines, WAIT])
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == READY
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
    return said, process.returncode


def test_it_is_done_and_the_process_ends_by_the_signal_though_one_of_it_fails():
    said, status = said_and_status(
        "call_before_termination(fail)", "call_before_termination(lambda: say('done'))"
    )
    assert (said, status) == (b"done\n", -signal.SIGTERM)


def test_a_second_signal_does_not_end_what_the_first_one_began():
    said, status = said_and_status(
        "def twice():",
        "    os.kill(os.getpid(), signal.SIGTERM)",
        "    say('done')",
        "call_before_termination(twice)",
    )
    assert (said, status) == (b"done\n", -signal.SIGTERM)


def test_what_handles_the_signal_already_goes_on_doing_so():
    said, status = said_and_status(
        "signal.signal(signal.SIGTERM, lambda *_: (say('mine'), os._exit(3)))",
        "call_before_termination(lambda: say('done'))",
    )
    assert (said, status) == (b"mine\n", 3)


def test_a_forked_child_does_nothing_of_what_its_parent_has_to_do():
    said, status = said_and_status(
        "call_before_termination(lambda: say('done'))",
        "child = os.fork()",
        "if not child: os.kill(os.getpid(), signal.SIGTERM)",
        "assert os.waitpid(child, 0)[1] == signal.SIGTERM",
    )
    assert (said, status) == (b"done\n", -signal.SIGTERM)


def test_nothing_is_asked_for_in_another_thread():
    said, status = said_and_status(
        "other = threading.Thread(target=call_before_termination, args=(lambda: say('done'),))",
        "other.start()",
        "other.join()",
    )
    assert (said, status) == (b"", -signal.SIGTERM)
