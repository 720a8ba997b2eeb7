"""Which topics a client's pattern names, and the hash of a list."""

import pytest

from spark_ledger.broker.topic_lists import (
    PATTERN_CHARS_MAX,
    STEPS_MAX,
    PatternRefused,
    TopicsPattern,
    check_length,
    steps_of,
    topics_hash,
)
from spark_ledger.broker.wire.commands import Refusal, ServerError

A, B = "persistent://public/default/a-partition-0", "persistent://public/default/b"


def test_the_hash_of_a_list_is_that_of_pulsars_client():
    assert topics_hash([B, A]) == topics_hash([A, B]) == "75d7a367"  # TopicList.calculateHash
    assert topics_hash([]) == "00000000"


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("persistent://public/default/a", [A]),
        ("^persistent://public/default/.$", [A, B]),
        ("public/default/.*", [A, B]),
        ("non-persistent://public/default/b", [B]),
        (".*/[b-z]", [B]),
        ("a|b", []),
        ("public/default/a-partition-0", []),
        (r"\Qpublic/default/b\E", [B]),
    ],
)
def test_a_pattern_is_for_whole_names_without_domain_and_partition(pattern, matching):
    assert TopicsPattern.parse(pattern).matching([A, B]) == matching


@pytest.mark.parametrize(
    "pattern",
    ["a(?!b)", "(", r"(a)\1", "x" * (PATTERN_CHARS_MAX + 1), "(.?){501}", "((.?){50}){20}y"],
)
def test_a_pattern_that_is_too_long_or_costly_or_not_of_re2_is_left_to_the_client(pattern):
    with pytest.raises(PatternRefused, match="filter the list yourself") as refused:
        TopicsPattern.parse(pattern)
    assert refused.value.code is ServerError.NOT_ALLOWED


def test_counted_repetitions_count_as_often_as_they_repeat():
    assert steps_of(r"logs-\d{4}") == 10 * 4
    assert steps_of("(a{2,30}){0}") == 12 * 30
    assert steps_of("a{2,}b{x}") == 9 * 2
    TopicsPattern.parse(r"logs-\d{4}-\d{2}")
    assert steps_of("a" * 9 + "{60}") > STEPS_MAX


def test_a_list_that_no_client_takes_is_refused():
    assert check_length([A, B]) == [A, B]
    with pytest.raises(Refusal, match="100000 topics have .* bytes"):
        check_length([A + "x" * 20] * 100_000)
