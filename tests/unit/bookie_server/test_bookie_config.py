import pytest

from bookie_server.api.settings import BadSettings, load
from bookie_server.config import (
    BookieConfig,
    advertised_address,
    advertised_frames,
    frames_listen,
)

ENTRY_BYTES = 16 << 20


@pytest.mark.parametrize(
    ("name", "least", "lower"),
    [
        ("journal_pending_bytes_max", ENTRY_BYTES + 65536, "entry_bytes_max (16777216)"),
        ("write_cache_bytes", 2 * (ENTRY_BYTES + 65536), "entry_bytes_max (16777216)"),
        ("recovery_reserve_bytes", ENTRY_BYTES + 4096, "entry_bytes_max (16777216)"),
        (
            "journal_bytes_max",
            ENTRY_BYTES + 65536 + (8 << 20),
            "entry_bytes_max (16777216) or journal_batch_bytes_max (8388608)",
        ),
    ],
)
def test_limits_that_the_largest_entry_does_not_fit_are_refused_with_what_would_do(
    name, least, lower
):
    load(BookieConfig, None, {name: least})
    with pytest.raises(BadSettings) as wrong:
        load(BookieConfig, None, {name: least - 1})
    assert str(wrong.value) == (
        f"{name} is {least - 1}, too small for the largest entry: give it at least {least}, or"
        f" lower {lower}"
    )


@pytest.mark.parametrize("given", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", ["disk_hang_s", "flush_interval_s", "disk_usage_high"])
def test_a_number_that_is_not_finite_is_refused(name, given):
    with pytest.raises(BadSettings, match=f"^{name}: .*, got '{given}'"):
        load(BookieConfig, None, {name: given})


def test_a_reserve_of_recovery_that_does_not_hold_the_largest_entry_is_refused():
    """A stream of large adds could keep such an entry out for ever."""
    with pytest.raises(BadSettings, match="recovery_reserve_bytes is 16777216, too small"):
        load(BookieConfig, None, {"recovery_reserve_bytes": 16 << 20})


@pytest.mark.parametrize("low", [0.95, 0.99])
def test_thresholds_of_disk_space_that_would_flap_are_refused(low):
    with pytest.raises(BadSettings, match=f"disk_usage_low {low} must be below disk_usage_high"):
        load(BookieConfig, None, {"disk_usage_low": low})


@pytest.mark.parametrize("listen", ["3181", "host", "host:port", ":3181", "host:70000"])
def test_an_address_to_listen_on_is_host_and_port(listen):
    with pytest.raises(BadSettings, match=r"listen: .*host:port"):
        load(BookieConfig, None, {"listen": listen})


@pytest.mark.parametrize(
    ("listen", "advertised", "told"),
    [
        ("127.0.0.1:3181", "", "127.0.0.1:3181"),
        ("127.0.0.1:0", "", "127.0.0.1:9"),
        ("0.0.0.0:3181", "node-1", "node-1:9"),
        ("0.0.0.0:3181", "node-1:80", "node-1:80"),
        ("[::1]:0", "", "[::1]:9"),
        ("0.0.0.0:0", "[::1]", "[::1]:9"),
    ],
)
def test_clients_are_told_the_advertised_address_or_the_bound_one(listen, advertised, told):
    config = BookieConfig(listen=listen, advertised=advertised)
    port = 9 if told.endswith(":9") else 3181
    assert advertised_address(config, port) == told


@pytest.mark.parametrize(
    ("settings", "at", "told"),
    [
        ({}, "127.0.0.1:0", "127.0.0.1:9"),
        ({"listen": "0.0.0.0:1", "advertised": "node-1"}, "0.0.0.0:0", "node-1:9"),
        ({"listen": "0.0.0.0:1", "advertised": "node-1:80"}, "0.0.0.0:0", "node-1:9"),
        ({"listen": "[::1]:1"}, "[::1]:0", "[::1]:9"),
        ({"frames_listen": "10.0.0.1:7"}, "10.0.0.1:7", "10.0.0.1:9"),
        ({"frames_advertised": "node-1:80"}, "127.0.0.1:0", "node-1:80"),
        ({"frames_advertised": "node-1"}, "127.0.0.1:0", "node-1:9"),
    ],
    ids=str,
)
def test_frames_are_spoken_on_the_host_of_grpc_unless_told_otherwise(settings, at, told):
    config = BookieConfig(**settings)
    assert frames_listen(config) == at
    assert advertised_frames(config, 9) == told


@pytest.mark.parametrize("listen", ["here", ""])
def test_an_address_for_frames_that_is_none_is_refused(listen):
    with pytest.raises(BadSettings, match=r"frames_listen: must be host:port or auto"):
        load(BookieConfig, None, {"frames_listen": listen})


def test_directories_are_one_or_a_list_but_not_both():
    def of(**given):
        return load(BookieConfig, None, given).directories("journal")

    assert of() == ["data/journal"]
    assert of(journal_directory="a") == ["a"]
    assert of(journal_directories="a, b,c") == of(journal_directories=["a", "b", "c"])
    assert of(journal_directories="a, b,c") == ["a", "b", "c"]
    with pytest.raises(BadSettings, match="either journal_directory or"):
        of(journal_directory="a", journal_directories="b")


def test_directories_on_the_command_line_are_a_list_with_commas_or_as_in_toml():
    def of(text):
        return load(BookieConfig, None, {"ledger_directories": text}).directories("ledger")

    assert of('["/a/l0","/a/l1"]') == of("/a/l0,/a/l1") == ["/a/l0", "/a/l1"]
    assert of("['/a, b', \"/c\"]") == ["/a, b", "/c"]
    assert of('["/only"]') == of("/only") == ["/only"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", ",", "a,,b", "[a, b]", '["a"', '"a","b"', "'a'", "a]", '["a", 1]', '["[a"]', '[""]'],
)
def test_directories_that_are_no_list_of_names_are_refused(text):
    with pytest.raises(BadSettings, match=r"^ledger_directories\S*: "):
        load(BookieConfig, None, {"ledger_directories": text})


@pytest.mark.parametrize("text", ["", " ", '"a"', "[a"])
def test_one_directory_is_named_without_quotes(text):
    with pytest.raises(BadSettings, match=r"^journal_directory: "):
        load(BookieConfig, None, {"journal_directory": text})


@pytest.mark.parametrize("text", ["foo:bar:baz", "a b", "::1", "host:", "host:x", "host:70000"])
@pytest.mark.parametrize("setting", ["advertised", "frames_advertised"])
def test_an_address_that_clients_could_not_use_is_refused(setting, text):
    with pytest.raises(BadSettings, match=f"^{setting}: must be host or host:port"):
        load(BookieConfig, None, {setting: text})


@pytest.mark.parametrize("rack", ["a b", "r1/", "/", "a//b", " r1", "r1\n", "r\u00e9"])
def test_a_rack_is_a_path_of_names(rack):
    with pytest.raises(BadSettings, match=r"^rack: must be names"):
        load(BookieConfig, None, {"rack": rack})
    for good in ("", "r1", "/hall-2/r.1", "hall/r_1"):
        assert load(BookieConfig, None, {"rack": good}).rack == good


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"message_bytes_max": 16 << 20}, "message_bytes_max must hold an entry"),
        ({"entry_bytes_max": 15 << 20, "message_bytes_max": 1}, "message_bytes_max must hold"),
        ({"minor_compaction_share": 0.6}, "minor_compaction_share 0.6 must not be above"),
    ],
)
def test_settings_that_disagree_are_refused_in_one_short_line(settings, said):
    with pytest.raises(BadSettings, match=f"^{said}") as wrong:
        load(BookieConfig, None, settings)
    assert len(str(wrong.value)) < 150
