"""What a caller gives a LedgerClient: taken from the settings, or refused at the door by name."""

import pytest

from spark_ledger import errors, process
from spark_ledger.client import ledger_client
from spark_ledger.client.ledger_client import LedgerClient
from spark_ledger.config import DEFAULT_SERVICE_URL, ClientConfig, client_config
from spark_ledger.process import background_loop
from tests.unit.spark_ledger.ledger.fakes import cluster_of

SURROGATE = "\ud800"


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch):
    """The service URLs that were connected to; behind each are four bookies."""
    monkeypatch.delenv("LEDGER_SERVICE_URL", raising=False)
    urls, stores = [], []

    async def to_fakes(service_url: str, config: ClientConfig | None = None):
        urls.append(service_url)
        chosen = config.model_dump(exclude_unset=True) if config else {}
        stores.append((await cluster_of(4, **chosen))[1])
        return stores[-1]

    for module in (process, ledger_client):
        monkeypatch.setattr(module, "connect", to_fakes)
    yield urls
    for store in stores:
        background_loop().run(store.close())


@pytest.fixture
def client(connected):
    return LedgerClient()


@pytest.fixture
def reader(client):
    with client.create_ledger(3, 3, 2) as writer:
        for number in range(5):
            writer.append(b"%d" % number)
    return client.open_ledger(writer.ledger_id)


# -- settings ------------------------------------------------------------------------------------


def test_a_url_given_wins_over_the_settings_those_over_the_environment(connected, monkeypatch):
    settings = ClientConfig(service_url="zk://settings:1/x")
    monkeypatch.setenv("LEDGER_SERVICE_URL", "zk://environment:1/x")
    LedgerClient("zk://given:1/x", settings)
    assert LedgerClient(config=settings).service_url == "zk://settings:1/x"
    LedgerClient(config=client_config(service_url="zk://settings:1/x"))
    LedgerClient(config=ClientConfig(ack_quorum=1))
    LedgerClient(config=client_config(ack_quorum=1))
    monkeypatch.delenv("LEDGER_SERVICE_URL")
    LedgerClient(config=ClientConfig(ack_quorum=1))
    assert connected == [
        "zk://given:1/x",
        *["zk://settings:1/x"] * 2,
        *["zk://environment:1/x"] * 2,
        DEFAULT_SERVICE_URL,
    ]


def test_the_connection_of_a_process_is_made_where_the_settings_say(connected):
    process.ledger_store(config=ClientConfig(service_url="zk://settings:2/x"))
    assert connected == ["zk://settings:2/x"]
    process._stores.forget(lambda _: True)


def test_quorums_that_are_not_given_are_those_of_the_settings(connected):
    client = LedgerClient(config=ClientConfig(ensemble_size=4, write_quorum=4, ack_quorum=3))

    def quorums(*given, **named):
        record = client.ledger_metadata(client.create_ledger(*given, **named).ledger_id)
        return record.ensemble_size, record.write_quorum, record.ack_quorum

    assert quorums() == (4, 4, 3)
    assert quorums(ack_quorum=4) == (4, 4, 4)
    assert quorums(3, 3, 1) == (3, 3, 1)
    with pytest.raises(errors.BadConfig, match="ensemble_size 3 >= write_quorum 4"):
        client.create_ledger(3)


def test_a_client_is_given_a_url_and_settings_and_nothing_else(connected):
    with pytest.raises(TypeError, match=r"service_url is a str, got ClientConfig"):
        LedgerClient(ClientConfig())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config is a ClientConfig .*, got dict"):
        LedgerClient(config={"racks": "hard"})  # type: ignore[arg-type]
    assert connected == []


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"write_quorum": "a"}, TypeError, "write_quorum is an int, got 'a'"),
        ({"ensemble_size": 3.0}, TypeError, "ensemble_size is an int, got 3.0"),
        ({"ack_quorum": True}, TypeError, "ack_quorum is an int, got True"),
        ({"password": "abc"}, TypeError, "password is bytes, got str"),
        ({"metadata": {"a": b"x"}}, TypeError, "metadata: the value of 'a' is a str, got bytes"),
        ({"metadata": {"a": None}}, TypeError, "metadata: the value of 'a' is a str, got NoneType"),
        ({"metadata": {"a": 1}}, TypeError, "metadata: the value of 'a' is a str, got int"),
        ({"metadata": {1: "a"}}, TypeError, "metadata: a key is a str, got 1 (int)"),
        ({"metadata": None}, TypeError, "metadata is a mapping of str to str, got NoneType"),
        ({"metadata": ["a"]}, TypeError, "metadata is a mapping of str to str, got list"),
        ({"metadata": {"a": SURROGATE}}, ValueError, r"metadata: the value of 'a'"),
        ({"metadata": {SURROGATE: "a"}}, ValueError, r"metadata: the key '\ud800'"),
    ],
)
def test_what_no_ledger_can_be_made_of_is_refused_by_name(client, given, kind, says):
    with pytest.raises(kind) as caught:
        client.create_ledger(**given)
    assert says in str(caught.value)
    assert list(client.list_ledgers()) == []


def test_an_ensemble_that_no_record_could_name_is_refused_before_bookies_are_looked_for(client):
    with pytest.raises(errors.BadConfig, match="ensemble_size 1000000000 is more than 1000"):
        client.create_ledger(10**9, 3, 2)


def test_the_password_itself_is_in_no_error(client):
    with pytest.raises(TypeError) as caught:
        client.create_ledger(password="hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("verb", ["open_ledger", "delete_ledger", "ledger_metadata"])
@pytest.mark.parametrize("ledger_id", [-1, 2**63])
def test_a_number_that_is_no_ledger_id_is_refused(client, verb, ledger_id):
    with pytest.raises(ValueError, match=rf"ledger_id is 0 to 9\d+, got {ledger_id}$"):
        getattr(client, verb)(ledger_id)
    with pytest.raises(TypeError, match="ledger_id is an int, got '7'"):
        getattr(client, verb)("7")


def test_a_password_in_the_place_of_recover_is_refused(client):
    with pytest.raises(TypeError, match="recover is a bool, got bytes"):
        client.open_ledger(1, b"secret")
    with pytest.raises(TypeError, match="password is bytes, got str"):
        client.open_ledger(1, password="secret")


@pytest.mark.parametrize(
    ("first", "last", "kind", "says"),
    [
        (0.5, 1, TypeError, "first is an int, got 0.5"),
        (0, "1", TypeError, "last is an int, got '1'"),
        (0, None, TypeError, "last is an int, got None"),
        (-1, 3, ValueError, "first is 0 or more, got -1"),
        (5, 3, ValueError, "first is 5, so last is 4 or more (4: an empty range), got 3"),
        (0, -2, ValueError, "last is -1 or more"),
    ],
)
def test_a_range_that_is_none_is_refused_when_it_is_asked_for(reader, first, last, kind, says):
    with pytest.raises(kind) as caught:
        reader.read(first, last)  # without a step of the iterator
    assert says in str(caught.value)


def test_the_empty_range_at_any_place_is_empty(client, reader):
    assert [*reader.read(0, -1)] == [*reader.read(3, 2)] == []
    empty = client.open_ledger(client.create_ledger().ledger_id)
    assert [*empty.read(0, empty.last_add_confirmed)] == []


def test_where_to_follow_from_is_checked_when_it_is_asked_for(reader):
    with pytest.raises(ValueError, match="first is 0 or more, got -1"):
        reader.tail(-1)
    with pytest.raises(ValueError, match="after is -1 or more, got -2"):
        reader.read_when_confirmed(-2, 1)
    for seconds in ("1", None):
        with pytest.raises(TypeError, match="timeout_s is a number of seconds, got"):
            reader.read_when_confirmed(0, seconds)
    with pytest.raises(ValueError, match="timeout_s is a number of seconds, got nan"):
        reader.read_when_confirmed(0, float("nan"))
    assert [entry_id for entry_id, _ in reader.tail(3)] == [3, 4]


def test_an_entry_is_bytes_and_its_rows_a_number(client):
    writer = client.create_ledger()
    for payload in ("text", None, 7, ["text"]):
        with pytest.raises(TypeError, match="payload is bytes, or a list of buffers, got"):
            writer.append(payload)
    with pytest.raises(TypeError, match="rows is an int, got '1'"):
        writer.append(b"x", "1")
    assert writer.append(b"x") == 0


# -- what is no defect is not told as one --------------------------------------------------------


def test_a_ledger_that_is_written_is_not_deleted_and_the_error_says_what_to_do(client):
    writer = client.create_ledger()
    with pytest.raises(errors.LedgerNotClosed, match=r"NOT_CLOSED.*OPEN.*Close or recover it"):
        client.delete_ledger(writer.ledger_id)
    writer.close()
    client.delete_ledger(writer.ledger_id)


@pytest.mark.parametrize("durability", ["synced", "page-cache"])
def test_a_ledger_is_as_durable_as_its_maker_asks(client, durability):
    with client.create_ledger(3, 3, 2, durability=durability) as writer:
        assert client.ledger_metadata(writer.ledger_id).durability == durability


def test_a_durability_that_is_none_is_refused_by_name(client):
    with pytest.raises(ValueError, match="durability is 'synced' or 'page-cache', got 'fast'"):
        client.create_ledger(3, 3, 2, durability="fast")
    with pytest.raises(TypeError, match="durability is a str, got bool"):
        client.create_ledger(3, 3, 2, durability=True)
