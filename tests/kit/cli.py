"""`spark-ledger ...` as a user runs it, and how it ends."""

import os
import subprocess
import sys

from tests.kit import commands

TIMEOUT_S = 120


def spark_ledger(
    *arguments: object, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    words = [str(each) for each in arguments]
    if env is None:
        return commands.server().run(words, TIMEOUT_S)
    return subprocess.run(
        [sys.executable, "-m", commands.MODULE, *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **env},
    )


def succeeds(*arguments: object, env: dict[str, str] | None = None) -> str:
    ended = spark_ledger(*arguments, env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def fails(*arguments: object, env: dict[str, str] | None = None) -> str:
    """What is said on standard error: one line, and nothing on standard output."""
    ended = spark_ledger(*arguments, env=env)
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr
