"""What the verbs of subscriptions refuse before they connect."""

import pytest
from typer.testing import CliRunner

from spark_ledger.cli.main import app
from spark_ledger.errors import BadConfig


def refusal_of(*words: str) -> str:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, BadConfig)
    return str(error)


@pytest.mark.parametrize("age", ["3600", " 5 ", "0", "long", "1.5h", "9" * 20])
def test_an_age_without_a_unit_is_refused_with_the_units(age):
    refusal = refusal_of("subscription", "expire", "T", "s", age)
    assert "Give a number with ms, s, m, h, d" in refusal


@pytest.mark.parametrize("age", ["0s", "0ms", "00h"])
def test_an_age_of_0_is_refused_and_the_verb_that_passes_all_messages_is_named(age):
    assert "subscription clear" in refusal_of("subscription", "expire", "T", "s", age)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("subscription", "skip", "T", "s", "-1"), "'-1'"),
        (("subscription", "skip", "T", "s", "-12", "--json"), "'-12'"),
        (("subscription", "expire", "T", "s", "-5s"), "'-5s'"),
        (("topic", "grow", "T", "-2"), "'-2'"),
        (("produce", "T", "-3"), "'-3'"),
    ],
)
def test_a_negative_number_is_refused_by_what_is_wrong_with_it(words, number):
    words = refusal_of(*words)
    assert number in words
    assert "must not be negative" in words and "give --" in words


def test_an_unknown_option_stays_an_unknown_option():
    result = CliRunner().invoke(app, ["subscription", "skip", "T", "s", "1", "-x"])
    assert result.exit_code == 2
    assert "No such option: -x" in result.output


def test_the_help_of_topic_set_names_expiry_quotas_limits_and_rates():
    text = CliRunner().invoke(app, ["topic", "set", "--help"]).output
    for name in ("message_ttl_ms", "backlog_bytes_max", "publish_rate", "_max", "topic describe"):
        assert name in text
