"""Input of callers, checked before it is used: every setting of a client, with its unit, default
and meaning (conf/client.toml lists them); the service URL; arguments. A wrong argument raises a
TypeError or ValueError here, which names the argument and its value.

Always true: E >= Qw >= Qa >= 1; the service URL is the one given, else the one in the settings,
else LEDGER_SERVICE_URL, else the default. It names a ZooKeeper and a cluster in it,
zk://host:port[,host:port...]/root: at least one host, every host with a port, and a root that is a
path of at least one name ("/ledger"). `parse(str(url))` equals `url` for every ServiceUrl. No error
shows a password.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from bookie_server.api.settings import (
    DEFAULT_SERVICE_URL,
    PORT_DEFAULT,
    SCHEME,
    BadSettings,
    S,
    Settings,
    load,
)
from spark_ledger.errors import BadConfig
from spark_ledger.units import MIB

SERVICE_URL_VARIABLE = "LEDGER_SERVICE_URL"


class ClientConfig(Settings):
    """The settings of a ledger client and the topic layer above it. Sizes are bytes, times are
    seconds. Make one by `client_config`, whose errors name the setting; the constructor raises
    pydantic's ValidationError. E, Qw and Qa are for LedgerClient.create_ledger: a topic has its
    own, fixed when it is made."""

    SECTIONS: ClassVar = {
        "service_url": "which cluster",
        "ensemble_size": "replication of new ledgers\n"
        "For LedgerClient.create_ledger without these arguments. A topic has its own quorums, fixed"
        " when it is made: 3, 3, 2, or those of the writer's options.",
        "add_timeout_s": "how long",
        "ensemble_change": "which bookies",
        "inflight_bytes": "how much",
    }
    """The headings of conf/client.toml, each above the setting with this name."""

    service_url: str = Field(
        DEFAULT_SERVICE_URL, description="Where the cluster is: zk://host:port[,host:port...]/root."
    )

    ensemble_size: int = Field(
        3, ge=1, description="E: bookies that the entries of a ledger are striped over."
    )
    write_quorum: int = Field(3, ge=1, description="Qw: copies of every entry.")
    ack_quorum: int = Field(
        2, ge=1, description="Qa: copies on disk before an entry counts as written."
    )

    add_timeout_s: float = Field(
        30.0, gt=0, description="Seconds for one append as a whole, all ensemble changes included."
    )
    replica_timeout_s: float = Field(
        5.0, gt=0, description="Seconds for one send to one bookie, after which its slot fails."
    )
    read_timeout_s: float = Field(
        5.0, gt=0, description="Seconds for one read request to one bookie."
    )
    recovery_timeout_s: float = Field(
        30.0, gt=0, description="Seconds for the recovery of one ledger as a whole."
    )
    metadata_timeout_s: float = Field(
        15.0, gt=0, description="Seconds for one call to the metadata store."
    )
    outage_timeout_s: float = Field(
        0.0,
        ge=0,
        description="Seconds from the beginning of an outage of the metadata store in which calls"
        " wait for the outage to end. Each call waits metadata_timeout_s at least. For Spark's"
        " queries it is the option outageTimeout.",
    )
    session_timeout_s: float = Field(
        30.0, gt=0, description="Seconds without contact after which ZooKeeper ends the session."
    )
    connect_timeout_s: float = Field(
        10.0, gt=0, description="Seconds to reach the metadata store when a client starts."
    )
    spare_grace_s: float = Field(
        12.0,
        ge=0,
        description="Seconds to wait for bookies to come back, if an add has no ack quorum, or a"
        " new ledger has too few bookies.",
    )
    speculative_read_delay_s: float = Field(
        0.3, gt=0, description="Seconds after which a read asks the next replica too."
    )
    explicit_lac_s: float = Field(
        0.1,
        gt=0,
        description="Seconds without an append after which the writer sends the last add confirmed"
        " by itself, for readers that follow. If no add is under way, the writer sends it at once,"
        " but only once in this time.",
    )
    long_poll_s: float = Field(
        5.0, gt=0, description="Seconds that one request for news of a ledger waits at a bookie."
    )
    directory_refresh_s: float = Field(
        30.0,
        gt=0,
        description="Seconds after which the list of bookies is read again if no watch fired.",
    )

    ensemble_change: Literal["at-once", "delayed"] = Field(
        "at-once",
        description='When a bookie that failed is replaced: "at-once", or "delayed" until a write'
        " set has fewer than Qa bookies that have not failed (fewer fragments, but more entries"
        " that lack a copy).",
    )
    quarantine_failures: int = Field(
        3,
        ge=1,
        description="Failed or slow responses within the window that put a bookie in quarantine: it"
        " is chosen last.",
    )
    quarantine_window_s: float = Field(
        60.0, gt=0, description="Seconds over which failed and slow responses are counted."
    )
    quarantine_s: float = Field(
        120.0, ge=0, description="Seconds in which a bookie in quarantine is chosen last. 0: none."
    )
    slow_add_s: float = Field(
        2.0, gt=0, description="Seconds for one send to one bookie beyond which it counts as slow."
    )
    placement: str = Field(
        "spark_ledger.ledger.placement:choose",
        description="The function that chooses bookies: module:function. It gets the arguments that"
        " the default function gets.",
    )
    racks: Literal["soft", "hard"] = Field(
        "soft",
        description='Copies on different racks: "soft", where possible; "hard", always: otherwise'
        " no ledger is made and no bookie replaced.",
    )

    inflight_bytes: int = Field(
        16 * MIB,
        gt=0,
        description="Bytes appended to one ledger and not yet acknowledged. Beside them, as many"
        " acknowledged bytes may wait for their last copies.",
    )
    read_ahead_bytes: int = Field(
        20 * MIB, gt=0, description="Bytes that one reader fetches ahead of its user."
    )
    read_request_bytes: int = Field(
        4 * MIB, gt=0, description="Bytes asked of one bookie in one read request."
    )
    local_reads: bool = Field(
        True,
        description="Whether large entries of bookies on this host are read from the bookies'"
        " files, if this process may read those.",
    )
    frame_bytes_max: int = Field(
        4 * MIB, gt=0, description="Bytes of adds packed into one message to one bookie."
    )
    frames_in_flight: int = Field(
        4, ge=1, description="Messages with adds under way to one bookie at a time."
    )
    entry_bytes_max: int = Field(
        16 * MIB, gt=0, description="Bytes of the largest entry; bookies have their own limit."
    )
    fragments_max: int = Field(
        64,
        ge=1,
        description="The most fragments (ensemble changes) of a ledger; its user then begins a new"
        " ledger.",
    )

    @model_validator(mode="after")
    def _quorums(self) -> "ClientConfig":
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            raise ValueError("ensemble_size >= write_quorum >= ack_quorum does not hold")
        return self


DEFAULTS = load(ClientConfig)


def settings_of(kind: type[S], file: Path | None = None, **overrides: Any) -> S:
    """The settings of that kind, from `file`, and from `overrides` that are not None, which take
    precedence. Raises errors.BadConfig, which names the setting."""
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return load(kind, file, given)
    except BadSettings as error:
        raise BadConfig(str(error)) from None


def client_config(file: Path | None = None, **overrides: Any) -> ClientConfig:
    """The client's settings, from `file` (as conf/client.toml) and from `overrides`, which take
    precedence: `client_config(Path("client.toml"), racks="hard")`. `service_url` comes from the
    environment if neither gives it.

    Raises errors.BadConfig, which names the setting.
    """
    config = settings_of(ClientConfig, file, **overrides)
    from_environment = os.environ.get(SERVICE_URL_VARIABLE)
    if from_environment and "service_url" not in config.model_fields_set:
        return config.model_copy(update={"service_url": from_environment})
    return config


def resolve_service_url(given: str | None = None, config: ClientConfig | None = None) -> str:
    """The service URL to use: `given`, else the one that `config` was made with, else
    LEDGER_SERVICE_URL, else the default."""
    own = config.service_url if config and "service_url" in config.model_fields_set else None
    return given or own or os.environ.get(SERVICE_URL_VARIABLE) or DEFAULT_SERVICE_URL


_HOST = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d+))?$")
_ROOT = re.compile(r"^(/[A-Za-z0-9._-]+)+$")


@dataclass(frozen=True, slots=True)
class ServiceUrl:
    """`hosts` are "host:port"; `root` is the path of the cluster's root node."""

    hosts: tuple[str, ...]
    root: str

    def __str__(self) -> str:
        return f"{SCHEME}://{','.join(self.hosts)}{self.root}"


def parse(text: str) -> ServiceUrl:
    """The parts of a service URL; a port left out is 2281. Raises errors.BadConfig."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme != SCHEME:
        raise _bad(text, f"it must begin with {SCHEME}://")
    hosts, slash, root = rest.partition("/")
    root = "/" + root.rstrip("/")
    if not slash or not _ROOT.match(root) or {".", ".."} & set(root.split("/")):
        raise _bad(text, "after the hosts comes the cluster's root, like /ledger")
    return ServiceUrl(tuple(_host(part, text) for part in hosts.split(",")), root)


def _host(part: str, text: str) -> str:
    match = _HOST.match(part.strip())
    if match is None:
        raise _bad(text, f"{part!r} is not host:port")
    port = int(match.group(2) or PORT_DEFAULT)
    if not 0 < port < 65536:
        raise _bad(text, f"{port} is no port")
    return f"{match.group(1)}:{port}"


def _bad(text: str, why: str) -> BadConfig:
    return BadConfig(f"{text!r} is no service URL: {why}", f"Write it like {DEFAULT_SERVICE_URL}.")


LEDGER_ID_MAX = 2**63 - 1
DURABILITIES = ("synced", "page-cache")


def check_client(service_url: object, config: object) -> None:
    if service_url is not None and not isinstance(service_url, str):
        raise TypeError(f"service_url is a str, got {_kind(service_url)}")
    if config is not None and not isinstance(config, ClientConfig):
        raise TypeError(
            "config is a ClientConfig (spark_ledger.config.client_config makes one),"
            f" got {_kind(config)}"
        )


def whole(name: str, value: Any) -> int:
    """The value as an int. Raises TypeError unless it is an int, or converts to one without loss,
    as numpy's integers do; a bool is refused."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an int, got {value!r}")
    return index(value)


def whole_or(name: str, value: Any, default: int) -> int:
    return default if value is None else whole(name, value)


def ledger_id_of(value: Any) -> int:
    ledger_id = whole("ledger_id", value)
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise ValueError(f"ledger_id is 0 to {LEDGER_ID_MAX}, got {ledger_id}")
    return ledger_id


def entry_id_of(name: str, value: Any, least: int = 0) -> int:
    entry_id = whole(name, value)
    if entry_id < least:
        raise ValueError(f"{name} is {least} or more, got {entry_id}")
    return entry_id


def entries_of(first: Any, last: Any) -> tuple[int, int]:
    """A range of entries, both ends included; `last` right before `first` is an empty range."""
    first, last = entry_id_of("first", first), whole("last", last)
    if last < first - 1:
        least = f"last is {first - 1} or more ({first - 1}: an empty range)"
        raise ValueError(f"first is {first}, so {least}, got {last}")
    return first, last


def seconds(name: str, value: Any) -> float:
    wrong = f"{name} is a number of seconds, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(wrong)
    if math.isnan(value):
        raise ValueError(wrong)
    return float(value)


def password_of(value: object) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"password is bytes, got {_kind(value)}")
    return bytes(value)


def durability_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"durability is a str, got {_kind(value)}")
    if value not in DURABILITIES:
        raise ValueError(f"durability is 'synced' or 'page-cache', got {value!r}")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a bool, got {_kind(value)}")
    return value


def metadata_of(value: object) -> dict[str, str]:
    """The value as metadata of a ledger's record: a dict of str to str."""
    if not isinstance(value, Mapping):
        raise TypeError(f"metadata is a mapping of str to str, got {_kind(value)}")
    for key, text in value.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata: a key is a str, got {key!r} ({_kind(key)})")
        if not isinstance(text, str):
            raise TypeError(f"metadata: the value of {key!r} is a str, got {_kind(text)}")
        _check_text(f"the key {key!r}", key)
        _check_text(f"the value of {key!r}", text)
    return dict(value)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        char = text[wrong.start]
        raise ValueError(f"metadata: {what} is no text: {char!r} at {wrong.start}") from None


def _kind(value: object) -> str:
    return type(value).__name__
