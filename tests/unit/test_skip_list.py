"""A skip that nobody allowed fails the run: tried in a pytest of its own."""

import pytest

from tests.kit import skip_list

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester, monkeypatch):
    allowed = pytester.path / "allowed_skips.txt"
    monkeypatch.setattr(skip_list, "ALLOWED", allowed)
    pytester.makepyfile(
        test_it="import pytest\n\ndef test_skipped():\n    pytest.skip('no machine for it')\n"
    )

    def run(text):
        allowed.write_text(text)
        return pytester.runpytest_inprocess("-p", "tests.kit.skip_list")

    return run


def test_a_skip_that_is_not_in_the_list_fails_the_run(suite):
    result = suite("# nothing is allowed\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*test_it.py::test_skipped*no machine for it*"])


@pytest.mark.parametrize("name", ["test_it.py::test_skipped", "test_it.py"])
def test_a_skip_in_the_list_does_not(suite, name):
    assert suite(f"{name} # needs a machine\n").ret == pytest.ExitCode.OK


def test_a_file_in_the_list_allows_no_skip_of_another_file(suite):
    assert suite("test_i.py # needs a machine\n").ret == pytest.ExitCode.TESTS_FAILED
