"""Every setting of a bookie, with its unit, default and meaning; conf/bookie.toml lists them.

Always true: an entry of the largest size fits every budget, so an idle bookie takes every entry up
to that size.
"""

import re
import tomllib
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from bookie_server.api.settings import DEFAULT_SERVICE_URL, Settings
from spark_ledger import net
from spark_ledger.units import MIB

_PADDED_HEADERS_BYTES = 64 * 1024  # headers and padding around the largest entry
_HEADERS_BYTES = 4096  # headers around the largest entry, without padding
MESSAGE_OVERHEAD_BYTES = 64 * 1024  # of a message, beside the payload of an entry
_RACK = re.compile(r"/?[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_QUOTES_AND_BRACKETS = "[]'\""


class StorageConfig(Settings):
    """Settings of the storage engine. Sizes are bytes, times seconds (ms if the name ends so)."""

    journal_bytes_max: int = Field(
        64 * MIB, gt=0, description="Size of one journal segment, reserved when it is made."
    )
    journal_batch_bytes_max: int = Field(
        8 * MIB,
        gt=0,
        description="Most bytes of one group commit; a larger entry is a group commit of its own.",
    )
    journal_pending_bytes_max: int = Field(
        32 * MIB,
        gt=0,
        description="Bytes of adds that wait for the journal; beyond it the response is BUSY.",
    )
    recovery_reserve_bytes: int = Field(
        20 * MIB,
        ge=0,
        description="Bytes that recovery may use beyond each budget; the largest entry must fit.",
    )
    page_cache_sync_s: float = Field(
        1.0, gt=0, description="Longest time that entries of page-cache ledgers stay unsynced."
    )
    receive_bytes_max: int = Field(
        128 * MIB,
        gt=0,
        description="Bytes of all requests without a response yet, adds included; beyond it the"
        " response is BUSY.",
    )

    write_cache_bytes: int = Field(
        96 * MIB,
        gt=0,
        description="Bytes of entries not yet in an entry log, both halves of the cache together.",
    )
    flush_interval_s: float = Field(
        5.0,
        gt=0,
        description="Longest time that an entry waits in the write cache before a flush begins.",
    )
    flush_chunk_bytes: int = Field(
        4 * MIB, gt=0, description="Bytes that a flush writes to the disk at once."
    )
    entry_log_bytes_max: int = Field(
        512 * MIB,
        gt=0,
        description="Size beyond which an entry log is closed and the next one begun.",
    )
    large_entry_bytes: int = Field(
        32 * 1024,
        ge=0,
        description="Entries of at least so many bytes are written once, straight to an entry log,"
        " which a start reads as a journal; 0: every entry is written to the journal first.",
    )
    entry_bytes_max: int = Field(16 * MIB, gt=0, description="Largest payload of an entry.")

    read_bytes_max: int = Field(
        4 * MIB,
        gt=0,
        description="Most bytes in one response, whatever the request; one entry always fits.",
    )
    read_pending_bytes_max: int = Field(
        64 * MIB,
        gt=0,
        description="Bytes of responses that are being read from disk; beyond it the response is"
        " BUSY.",
    )
    retry_after_ms: int = Field(
        20, gt=0, description="How long a caller that got BUSY waits before its next try."
    )
    read_cache_bytes: int = Field(
        48 * MIB,
        ge=0,
        description="Bytes of the read cache: entries read from entry logs, read-ahead included;"
        " 0: no read cache.",
    )
    read_ahead_bytes: int = Field(
        4 * MIB,
        ge=0,
        description="Most bytes read beyond the request of a sequential reader; 0: no read-ahead.",
    )
    place_bytes_min: int = Field(
        32 * 1024,
        ge=0,
        description="Readers on this host get the locations of entries of so many bytes, and read"
        " them from the files themselves; 0: never.",
    )

    tombstone_sweep_s: float = Field(
        300.0,
        gt=0,
        description="Pause between two looks for deleted ledgers; after the look such a ledger"
        " takes no more adds.",
    )

    gc_interval_s: float = Field(
        60.0,
        gt=0,
        description="Pause between two passes that reclaim the space of deleted ledgers.",
    )
    overreplicated_wait_s: float = Field(
        3600.0,
        gt=0,
        description="Pause between two looks for closed ledgers whose copies here are surplus.",
    )
    minor_compaction_share: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Minor compaction takes the entry logs with a smaller share of live bytes.",
    )
    minor_compaction_s: float = Field(
        3600.0, gt=0, description="Pause between two minor compactions."
    )
    major_compaction_share: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Major compaction takes the entry logs with a smaller share of live bytes.",
    )
    major_compaction_s: float = Field(
        86_400.0, gt=0, description="Pause between two major compactions."
    )
    compaction_bytes_per_s: int = Field(
        32 * MIB, gt=0, description="Most bytes that compaction copies in a second."
    )
    scrub_interval_s: float = Field(
        604_800.0, gt=0, description="Time in which the scrub reads every entry log once."
    )
    scrub_bytes_per_s: int = Field(
        8 * MIB, gt=0, description="Most bytes that the scrub reads in a second."
    )

    disk_usage_high: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Used share of a disk beyond which it is full: the node becomes read-only.",
    )
    disk_usage_low: float = Field(
        0.90, gt=0, le=1, description="Used share below which a full disk is writable again."
    )
    disk_free_bytes_min: int = Field(
        256 * MIB,
        ge=0,
        description="Free bytes below which a disk is full, whatever its used share.",
    )
    disk_reserve_bytes: int = Field(
        32 * MIB,
        ge=0,
        description="Reserved in each directory for fences, recovery's adds and compaction.",
    )
    disk_check_s: float = Field(
        10.0,
        gt=0,
        description="Pause between two looks at free space; making a file looks at it too.",
    )
    disk_hang_s: float = Field(
        30.0,
        gt=0,
        description="Longest time that a call to a disk may take; then its directory has failed.",
    )

    limbo_check_s: float = Field(
        30.0,
        gt=0,
        description="Pause between two looks at the ledgers that the node has listed as in limbo.",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> "StorageConfig":
        """Raises ValueError when the largest entry would not fit a budget."""
        entry = self.entry_bytes_max + _PADDED_HEADERS_BYTES
        for name, least in (
            ("journal_bytes_max", entry + self.journal_batch_bytes_max),
            ("journal_pending_bytes_max", entry),
            ("write_cache_bytes", 2 * entry),
            ("read_pending_bytes_max", entry),
            ("receive_bytes_max", entry),
            ("recovery_reserve_bytes", self.entry_bytes_max + _HEADERS_BYTES),
        ):
            if getattr(self, name) < least:
                raise ValueError(self._too_small(name, least))
        if self.disk_usage_low >= self.disk_usage_high:
            raise ValueError(
                f"disk_usage_low {self.disk_usage_low} must be below disk_usage_high"
                f" {self.disk_usage_high}, or nodes flap"
            )
        if self.minor_compaction_share > self.major_compaction_share:
            raise ValueError(
                f"minor_compaction_share {self.minor_compaction_share} must not be above"
                f" major_compaction_share {self.major_compaction_share}"
            )
        return self

    def _too_small(self, name: str, least: int) -> str:
        others = ["entry_bytes_max"]
        if name == "journal_bytes_max":
            others.append("journal_batch_bytes_max")
        lower = " or ".join(f"{other} ({getattr(self, other)})" for other in others)
        return (
            f"{name} is {getattr(self, name)}, too small for the largest entry: give it at least"
            f" {least}, or lower {lower}"
        )


class BookieConfig(StorageConfig):
    """Settings of a bookie: of the storage engine, the network, the disks and the process."""

    SECTIONS: ClassVar = {
        "service_url": "which cluster",
        "listen": "the network",
        "journal_directory": "the disks",
        "journal_bytes_max": "the journal: an entry is acknowledged when it is synced there",
        "write_cache_bytes": "the entry logs: where entries rest",
        "read_bytes_max": "reads",
        "tombstone_sweep_s": "deleted ledgers",
        "gc_interval_s": "reclaiming space",
        "disk_usage_high": "space that runs out",
        "limbo_check_s": "ledgers that may have lost entries here",
        "autorecovery": "repair and upkeep",
        "log_level": "logging",
    }
    """The headings of conf/bookie.toml, each by the setting that follows it."""

    service_url: str = Field(
        DEFAULT_SERVICE_URL,
        description="Which cluster to join: zk://host:port[,host:port...]/root.",
    )
    session_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Without contact for this long, ZooKeeper drops the bookie from the list.",
    )
    connect_timeout_s: float = Field(
        10.0, gt=0, description="Time to reach ZooKeeper at start before giving up."
    )

    listen: str = Field(
        "127.0.0.1:3181",
        description="host:port to serve gRPC on, for clients in other languages; port 0 takes a"
        " free one, which is registered.",
    )
    advertised: str = Field(
        "", description="Registered address of gRPC: host or host:port; empty: as in listen."
    )
    frames_listen: str = Field(
        "auto",
        description="host:port to serve frames on, by which Spark Ledger's own clients and"
        " command line reach the bookie; auto: the host of listen and a free port.",
    )
    frames_advertised: str = Field(
        "",
        description="Registered address of frames: host or host:port; empty: the registered host"
        " of gRPC.",
    )
    rack: str = Field(
        "",
        description="Where the machine stands, as r1 or /hall/r1; copies are spread over racks."
        " Empty: unknown.",
    )
    refresh_s: float = Field(
        30.0, gt=0, description="How often the registration's free space is brought up to date."
    )
    message_bytes_max: int = Field(
        64 * MIB, gt=0, description="Largest message on the wire, either way."
    )
    drain_timeout_s: float = Field(
        2.0, ge=0, description="Time that calls under way get to end when the bookie stops."
    )

    journal_directory: str = Field(
        "data/journal", description="Folder of the journal; the fastest disk to sync."
    )
    journal_directories: list[str] = Field(
        [], description="Instead of journal_directory: several folders, best one on each disk."
    )
    ledger_directory: str = Field(
        "data/ledgers", description="Folder of entry logs and index; may be another disk."
    )
    ledger_directories: list[str] = Field(
        [], description="Instead of ledger_directory: several folders, best one on each disk."
    )

    autorecovery: bool = Field(
        True,
        description="Whether the bookie hosts a second process, which repairs the cluster's ledgers"
        " and does the upkeep of topics; the processes of several bookies share the work. false:"
        " where `spark-ledger autorecovery start` runs on other machines.",
    )

    log_level: str = Field(
        "INFO", description="What is logged to standard error: DEBUG, INFO, WARNING or ERROR."
    )

    def directories(self, kind: str) -> list[str]:
        """The directories of a kind: "journal" or "ledger"."""
        names: list[str] = getattr(self, f"{kind}_directories")
        return names or [getattr(self, f"{kind}_directory")]

    @field_validator("journal_directories", "ledger_directories", mode="before")
    @classmethod
    def _list_of_text(cls, value: object) -> object:
        """A text is a list as in TOML, or names with commas between them."""
        return _parse_names(value) if isinstance(value, str) else value

    @field_validator(
        "journal_directory", "journal_directories", "ledger_directory", "ledger_directories"
    )
    @classmethod
    def _check_names(cls, value: str | list[str]) -> str | list[str]:
        return _checked_name(value) if isinstance(value, str) else list(map(_checked_name, value))

    @model_validator(mode="after")
    def _check_one_setting_per_kind(self) -> "BookieConfig":
        for kind in ("journal", "ledger"):
            single = f"{kind}_directory"
            default = type(self).model_fields[single].default
            if getattr(self, f"{kind}_directories") and getattr(self, single) != default:
                raise ValueError(f"give either {single} or {kind}_directories")
        return self

    @field_validator("listen", "frames_listen")
    @classmethod
    def _check_host_and_port(cls, listen: str, field: ValidationInfo) -> str:
        if field.field_name == "frames_listen" and listen == "auto":
            return listen
        try:
            net.split(listen)
        except ValueError:
            auto = " or auto" if field.field_name == "frames_listen" else ""
            raise ValueError(f"must be host:port{auto}, an IPv6 address in brackets") from None
        return listen

    @field_validator("advertised", "frames_advertised")
    @classmethod
    def _check_host(cls, advertised: str) -> str:
        try:
            if advertised:
                net.parse(advertised)
        except ValueError:
            text = "must be host or host:port, an IPv6 address in brackets"
            raise ValueError(text) from None
        return advertised

    @field_validator("rack")
    @classmethod
    def _check_rack(cls, rack: str) -> str:
        if rack and not _RACK.fullmatch(rack):
            raise ValueError("must be names of letters, digits, '_', '-', '.', with '/' between")
        return rack

    @field_validator("log_level")
    @classmethod
    def _check_level(cls, level: str) -> str:
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("must be DEBUG, INFO, WARNING or ERROR")
        return level

    @model_validator(mode="after")
    def _check_message_holds_entry(self) -> "BookieConfig":
        largest = self.entry_bytes_max + MESSAGE_OVERHEAD_BYTES
        if self.message_bytes_max < largest:
            raise ValueError(
                f"message_bytes_max must hold an entry of entry_bytes_max: at least {largest},"
                f" got {self.message_bytes_max}"
            )
        return self


def _parse_names(text: str) -> list[object]:
    """Raises ValueError for a malformed list, and for an empty list."""
    text = text.strip()
    if not text.startswith("["):
        return [name.strip() for name in text.split(",")]
    try:
        parsed = tomllib.loads(f"names = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    names = parsed.get("names")
    if not isinstance(names, list) or len(parsed) > 1:
        raise ValueError("""must be a,b or ["a", "b"], with quotes as in TOML""")
    if not names:
        raise ValueError("must name at least one directory")
    return names


def _checked_name(name: str) -> str:
    """The name. Raises ValueError for a text that is probably not meant as a directory's name."""
    if not name.strip():
        raise ValueError("must name a directory")
    if name[0] in _QUOTES_AND_BRACKETS or name[-1] in _QUOTES_AND_BRACKETS:
        raise ValueError(
            f"a directory's name does not begin or end with a quote or bracket, as {name} does;"
            """ several names are given as a,b or ["a", "b"]"""
        )
    return name


def advertised_address(config: BookieConfig, port: int) -> str:
    """The registered address of gRPC, given the port that was bound."""
    return _with_port(config.advertised or config.listen, port)


def frames_listen(config: BookieConfig) -> str:
    """host:port to serve frames on."""
    if config.frames_listen != "auto":
        return config.frames_listen
    return net.join(net.parse(config.listen)[0], 0)


def advertised_frames(config: BookieConfig, port: int) -> str:
    """The registered address of frames, given the port that was bound for them."""
    host, _ = net.parse(config.advertised or frames_listen(config))
    return _with_port(config.frames_advertised or net.bracketed(host), port)


def _with_port(address: str, port: int) -> str:
    """The address; if it has no port, with `port`."""
    host, address_port = net.parse(address)
    return net.join(host, address_port or port)
