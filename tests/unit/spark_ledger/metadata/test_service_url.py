import pytest

from spark_ledger.config import ServiceUrl, parse
from spark_ledger.errors import BadConfig


def test_a_url_is_its_hosts_and_its_root():
    assert parse("zk://127.0.0.1:2281/ledger") == ServiceUrl(("127.0.0.1:2281",), "/ledger")


def test_several_hosts_are_separated_by_commas():
    url = parse("zk://one:2181,two.example.com:2182,[::1]:2183/a/b")
    assert url == ServiceUrl(("one:2181", "two.example.com:2182", "[::1]:2183"), "/a/b")


def test_a_port_left_out_is_2281_and_a_slash_at_the_end_is_nothing():
    assert parse("zk://one,two:1/ledger/") == ServiceUrl(("one:2281", "two:1"), "/ledger")


@pytest.mark.parametrize("text", ["zk://h:1/r", "zk://a:1,b:2/x/y", "zk://[::1]:2181/l"])
def test_a_url_written_out_is_parsed_to_the_same(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:2281/ledger",
        "http://127.0.0.1:2281/ledger",
        "zk://127.0.0.1:2281",
        "zk://127.0.0.1:2281/",
        "zk:///ledger",
        "zk://host:port/ledger",
        "zk://host:0/ledger",
        "zk://host:65536/ledger",
        "zk://a b:1/ledger",
        "zk://one:1,,two:2/ledger",
        "zk://one:1//ledger",
        "zk://one:1/../ledger",
        "zk://one:1/led ger",
    ],
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(BadConfig, match=r"no service URL.*zk://127.0.0.1:2281/ledger") as refused:
        parse(text)
    assert repr(text) in str(refused.value)
