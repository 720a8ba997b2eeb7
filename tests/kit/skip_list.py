"""A pytest plugin: a test skipped without being named in allowed_skips.txt fails the whole run.

A test that does not run proves nothing, and a green run hides it. Loaded by
`-p tests.kit.skip_list`.
"""

from pathlib import Path

import pytest

ALLOWED = Path(__file__).with_name("allowed_skips.txt")


def allowed_skips(text: str) -> frozenset[str]:
    """The node ids in the list, of tests or of whole files; comments and blank lines are not part
    of it."""
    lines = (line.split(" # ")[0].strip() for line in text.splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))


class SkipList:
    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._forbidden: dict[str, str] = {}

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        expected_failure = hasattr(report, "wasxfail")
        file = report.nodeid.partition("::")[0]
        is_allowed = report.nodeid in self._allowed or file in self._allowed
        if report.skipped and not expected_failure and not is_allowed:
            self._forbidden[report.nodeid] = str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._forbidden and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid, reason in sorted(self._forbidden.items()):
            terminalreporter.write_line(f"skipped but not in {ALLOWED.name}: {nodeid}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    is_xdist_worker = hasattr(config, "workerinput")
    if not is_xdist_worker:
        config.pluginmanager.register(SkipList(allowed_skips(ALLOWED.read_text())))
