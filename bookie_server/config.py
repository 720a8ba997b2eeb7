"""Every setting of a bookie, with its unit, default and meaning; conf/bookie.toml lists them.

Always true: the limits of the storage engine have their defaults in storage_config.py, and its
rules hold for what is set here.
"""

from dataclasses import fields

from pydantic import Field, field_validator, model_validator

from bookie_server.api.settings import Settings
from bookie_server.storage_config import MIB, StorageConfig

_STORAGE = StorageConfig()


class BookieConfig(Settings):
    """Sizes are bytes, times seconds (or ms where the name says so)."""

    service_url: str = Field(
        "zk://127.0.0.1:2281/ledger",
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
        description="host:port to serve on; port 0 takes a free one, which is registered.",
    )
    advertised: str = Field(
        "",
        description="host or host:port that clients are told; empty: as in listen.",
    )
    rack: str = Field(
        "", description="Where the machine stands; copies are spread over racks. Empty: unknown."
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
    ledger_directory: str = Field(
        "data/ledgers", description="Folder of entry logs and index; may be another disk."
    )

    journal_bytes_max: int = Field(
        _STORAGE.journal_bytes_max,
        gt=0,
        description="Size of one journal segment, reserved when it is made.",
    )
    journal_batch_bytes_max: int = Field(
        _STORAGE.journal_batch_bytes_max,
        gt=0,
        description="Most bytes of one group commit; a larger entry goes alone.",
    )
    journal_pending_bytes_max: int = Field(
        _STORAGE.journal_pending_bytes_max,
        gt=0,
        description="Adds taken and not yet answered; beyond it the answer is busy.",
    )
    recovery_reserve_bytes: int = Field(
        _STORAGE.recovery_reserve_bytes,
        ge=0,
        description="What recovery's adds may use beyond the pending and cache budgets.",
    )
    write_cache_bytes: int = Field(
        _STORAGE.write_cache_bytes,
        gt=0,
        description="Entries not yet in an entry log, both halves of the cache together.",
    )
    flush_interval_s: float = Field(
        _STORAGE.flush_interval_s,
        gt=0,
        description="Longest time that an entry waits in the write cache before a flush begins.",
    )
    flush_chunk_bytes: int = Field(
        _STORAGE.flush_chunk_bytes,
        gt=0,
        description="Bytes that a flush gives to the disk at once.",
    )
    entry_log_bytes_max: int = Field(
        _STORAGE.entry_log_bytes_max,
        gt=0,
        description="Size beyond which an entry log is closed and the next one begun.",
    )
    entry_bytes_max: int = Field(
        _STORAGE.entry_bytes_max, gt=0, description="Largest payload of an entry."
    )
    read_bytes_max: int = Field(
        _STORAGE.read_bytes_max,
        gt=0,
        description="Most bytes in one reply, whatever is asked; one entry always fits.",
    )
    read_pending_bytes_max: int = Field(
        _STORAGE.read_pending_bytes_max,
        gt=0,
        description="Replies being read from disk; beyond it the answer is busy.",
    )
    retry_after_ms: int = Field(
        _STORAGE.retry_after_ms,
        gt=0,
        description="How long a caller who got busy waits before asking again.",
    )
    tombstone_sweep_s: float = Field(
        _STORAGE.tombstone_sweep_s,
        gt=0,
        description="Pause between two looks for ledgers that were deleted, which take no adds.",
    )
    log_level: str = Field(
        "INFO", description="What is logged to standard error: DEBUG, INFO, WARNING or ERROR."
    )

    def storage(self) -> StorageConfig:
        """The part that the storage engine takes."""
        return StorageConfig(**{part.name: getattr(self, part.name) for part in fields(_STORAGE)})

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, listen: str) -> str:
        host, colon, port = listen.rpartition(":")
        if not (host and colon and port.isdigit() and int(port) < 65536):
            raise ValueError("must be host:port")
        return listen

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, level: str) -> str:
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("must be DEBUG, INFO, WARNING or ERROR")
        return level

    @model_validator(mode="after")
    def _limits_agree(self) -> "BookieConfig":
        self.storage()
        return self


def advertised_address(config: BookieConfig, port: int) -> str:
    """What clients are told, given the port that was bound."""
    host, _, named = (config.advertised or config.listen).rpartition(":")
    if not host:
        return f"{config.advertised}:{port}"
    return f"{host}:{int(named) or port}" if named.isdigit() else f"{config.advertised}:{port}"
