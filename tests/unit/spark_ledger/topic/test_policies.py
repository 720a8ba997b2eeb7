import pytest

from spark_ledger import errors
from spark_ledger.topic.log import policies
from spark_ledger.topic.log.policies import TopicPolicies


def test_a_topic_keeps_its_rows_for_ever_unless_it_is_told_otherwise():
    kept = TopicPolicies()

    assert (kept.retention_ms, kept.retention_bytes) == (None, None)
    assert kept.delete_delay_ms == 24 * 3600 * 1000


def test_policies_are_read_back_as_they_were_written_and_of_older_topics_by_default():
    kept = TopicPolicies(3, 2, 2, retention_ms=5, retention_bytes=7, delete_delay_ms=0)
    plain = policies.to_json(kept)

    assert policies.from_json({**plain, "of_a_later_version": 1}) == kept
    assert not policies.from_json({**plain, "merging": False}).merging
    for name in ("retention_ms", "retention_bytes", "delete_delay_ms", "merging"):
        del plain[name]
    assert policies.from_json(plain) == TopicPolicies(3, 2, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"retention_ms": 0}, "retention_ms must not be 0"),
        ({"retention_bytes": -1}, "retention_bytes must not be -1"),
        ({"retention_ms": "1d"}, "retention_ms must be a whole number, got '1d'"),
        ({"delete_delay_ms": None}, "delete_delay_ms must be a whole number, got None"),
        ({"ledger_age_s_max": 0}, "ledger_age_s_max must not be 0"),
        ({"ack_quorum": True}, "ack_quorum must be a whole number, got True"),
        ({"write_quorum": 4}, "quorums 3/4/2"),
        ({"ack_quorum": 0}, "quorums 3/3/0"),
        ({"durability": "none"}, "durability 'none' is not one of"),
        ({"merging": "no"}, "merging must be true or false, got 'no'"),
        ({"merging": None}, "merging must be true or false, got None"),
        ({"retentionms": 1}, "no policy 'retentionms'.*Did you mean 'retention_ms'"),
    ],
)
def test_a_change_that_does_not_hold_is_an_error_that_names_it(change, said):
    with pytest.raises(errors.BadConfig, match=said):
        policies.with_changes(TopicPolicies(), change)


def test_changes_are_made_together():
    changed = policies.with_changes(TopicPolicies(), {"ensemble_size": 5, "write_quorum": 5})

    assert (changed.ensemble_size, changed.write_quorum, changed.ack_quorum) == (5, 5, 2)
    assert policies.with_changes(changed, {"retention_ms": None}) == changed


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("retention_ms", "7d", 7 * 86_400_000),
        ("retention_ms", "1500", 1500),
        ("retention_ms", "None", None),
        ("retention_bytes", "2 GiB", 2 << 30),
        ("retention_bytes", "10g", 10 << 30),
        ("retentionms", "7d", "7d"),
        ("ledger_age_s_max", "90m", 5400),
        ("ack_quorum", "2", 2),
        ("durability", "synced", "synced"),
        ("merging", "false", False),
        ("merging", "True", True),
        ("merging", "perhaps", "perhaps"),
    ],
)
def test_values_are_typed_as_people_say_them(name, text, value):
    assert policies.value_of_text(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("retention_ms", "7 days"),
        ("retention_ms", ""),
        ("retention_bytes", "1GB"),
        ("delete_delay_ms", "none"),
        ("ledger_age_s_max", "10ms"),
        ("ack_quorum", "2s"),
        ("retention_ms", "-1d"),
    ],
)
def test_a_value_that_is_none_is_an_error_that_names_it(name, text):
    with pytest.raises(errors.BadConfig, match=f"{name} cannot be"):
        policies.value_of_text(name, text)


@pytest.mark.parametrize("name", policies.RATES)
def test_a_rate_has_no_more_than_the_example_of_its_policy(name):
    example = policies.RATES[name]
    whole = example.split(", ")
    assert getattr(TopicPolicies(**{name: example}), name) == example
    assert policies.value_of_text(name, example) == example
    assert policies.value_of_text(name, "none") is None
    parts = {"5 messages", "5 bytes", "5 requests", "5 s", "relative"}
    taken = {part for part in parts if part.split()[-1] in {one.split()[-1] for one in whole}}
    for part in parts - taken:
        with pytest.raises(errors.BadConfig, match=f"Give '{example}'"):
            TopicPolicies(**{name: f"{whole[0]}, {part}"})
    for bad in ("", "5", 5, "fast"):
        with pytest.raises(errors.BadConfig, match=name):
            TopicPolicies(**{name: bad})
