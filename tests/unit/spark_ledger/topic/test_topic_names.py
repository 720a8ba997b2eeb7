import pytest

from spark_ledger import errors
from spark_ledger.topic.log.names import escape, parse_topic, unescape


def test_a_bare_name_is_a_topic_of_the_default_namespace():
    topic = parse_topic("flights")

    assert topic.full == "persistent://public/default/flights"
    assert topic.short == "flights"
    assert parse_topic(topic.full) == topic
    assert topic.path == "/topics/public/default/flights"


def test_a_topic_of_another_namespace_is_shown_by_its_full_name():
    topic = parse_topic("air/traffic/flights")

    assert topic.short == topic.full == "persistent://air/traffic/flights"


@pytest.mark.parametrize(
    "text", ["", "a/b", "a/b/c/d", "..", "a b", "persistent://t", "a//b", "x" * 201, "é", "a\n"]
)
def test_what_is_no_name_is_refused_with_the_form_a_name_has(text):
    with pytest.raises(errors.TopicNameInvalid, match=r"LEDGER_TOPIC.INVALID_NAME"):
        parse_topic(text)


@pytest.mark.parametrize("name", [None, 1, b"flights", ["flights"]])
def test_what_is_no_text_is_wrong_use_and_told_so(name):
    with pytest.raises(TypeError, match="a topic's name is text, not "):
        parse_topic(name)


def test_escaping_is_one_to_one_and_gives_one_level_of_a_path():
    texts = ["a/b", "a%2Fb", "*", ".", "..", "ä", "a@b", "plain-1_2.3", " "]

    levels = [escape(text) for text in texts]

    assert [unescape(level) for level in levels] == texts
    assert len(set(levels)) == len(texts)
    assert not any("/" in level or level in (".", "..") for level in levels)
    with pytest.raises(ValueError, match="empty"):
        escape("")
