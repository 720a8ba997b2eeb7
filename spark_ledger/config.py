"""Every setting of a client, with its unit, default and meaning; conf/client.toml lists them.

Always true: E >= Qw >= Qa >= 1; the service URL is the one given, else the one in the settings,
else LEDGER_SERVICE_URL, else the default.
"""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from bookie_server.api.settings import BadSettings, Settings, load
from spark_ledger.errors import BadConfig

DEFAULT_SERVICE_URL = "zk://127.0.0.1:2281/ledger"
SERVICE_URL_VARIABLE = "LEDGER_SERVICE_URL"
MIB = 1024 * 1024


class ClientConfig(Settings):
    """What a ledger client and the topic layer above it may be told. Sizes are bytes, times
    seconds. Made by `client_config`, whose errors name the setting; made directly, a wrong value
    is pydantic's ValidationError. E, Qw and Qa are those of LedgerClient.create_ledger: a topic has
    its own, fixed when it is made."""

    SECTIONS: ClassVar = {
        "service_url": "which cluster",
        "ensemble_size": "replication of new ledgers\n"
        "Of LedgerClient.create_ledger, where it is not told. A topic has its own quorums, fixed"
        " when it is made: 3, 3, 2, or what the writer's options say.",
        "add_timeout_s": "how long",
        "ensemble_change": "which bookies",
        "inflight_bytes": "how much",
    }
    """The headings of its file, each above the setting that is named."""

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
        5.0, gt=0, description="Seconds for one send to one bookie, after which its slot failed."
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
        description="Seconds after the beginning of an outage of the metadata store in which calls"
        " wait for its end, where that is longer than metadata_timeout_s. Spark's queries have the"
        " option outageTimeout for it.",
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
        description="Seconds that adds without an ack quorum, and new ledgers without enough"
        " bookies, wait for bookies to come back.",
    )
    speculative_read_delay_s: float = Field(
        0.3, gt=0, description="Seconds after which a read asks the next replica too."
    )
    explicit_lac_s: float = Field(
        0.1,
        gt=0,
        description="Seconds without an append after which the last add confirmed is written by"
        " itself, for readers that follow; written at once where nothing is under way, this often"
        " at most.",
    )
    long_poll_s: float = Field(
        5.0, gt=0, description="Seconds that one question for news of a ledger waits at a bookie."
    )
    directory_refresh_s: float = Field(
        30.0,
        gt=0,
        description="Seconds after which the list of bookies is read again, watch or no watch.",
    )

    ensemble_change: Literal["at-once", "delayed"] = Field(
        "at-once",
        description='When a bookie that failed is replaced: "at-once", or "delayed" until a write'
        " set has fewer than Qa others (fewer fragments, more entries short of a copy).",
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
        description="Who chooses bookies: module:function, called as documented there.",
    )
    racks: Literal["soft", "hard"] = Field(
        "soft",
        description='Copies on different racks: "soft", where possible; "hard", or not at all.',
    )

    inflight_bytes: int = Field(
        16 * MIB,
        gt=0,
        description="Bytes appended to one ledger and not yet acknowledged; as many again may wait"
        " for their last copies.",
    )
    read_ahead_bytes: int = Field(
        20 * MIB, gt=0, description="Bytes that one reader fetches ahead of its user."
    )
    read_request_bytes: int = Field(
        4 * MIB, gt=0, description="Bytes asked of one bookie in one read request."
    )
    local_reads: bool = Field(
        True,
        description="Large entries of bookies on this host are read from their files, where those"
        " may be read.",
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
        64, ge=1, description="Fragments (ensemble changes) after which a ledger is rolled."
    )

    @model_validator(mode="after")
    def _quorums(self) -> "ClientConfig":
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            raise ValueError("ensemble_size >= write_quorum >= ack_quorum does not hold")
        return self


def client_config(file: Path | None = None, **overrides: Any) -> ClientConfig:
    """The client's settings, of `file` (as conf/client.toml) and of `overrides`, which win over it:
    `client_config(Path("client.toml"), racks="hard")`. `service_url` comes from the environment
    where neither gives it.

    Raises errors.BadConfig naming the setting.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        config = load(ClientConfig, file, given)
    except BadSettings as error:
        raise BadConfig(str(error)) from None
    from_environment = os.environ.get(SERVICE_URL_VARIABLE)
    if from_environment and "service_url" not in config.model_fields_set:
        return config.model_copy(update={"service_url": from_environment})
    return config


def resolve_service_url(given: str | None = None, config: ClientConfig | None = None) -> str:
    """The service URL to use: `given`, else what `config` was told, else LEDGER_SERVICE_URL, else
    the default."""
    told = config.service_url if config and "service_url" in config.model_fields_set else None
    return given or told or os.environ.get(SERVICE_URL_VARIABLE) or DEFAULT_SERVICE_URL
