"""The settings of the storage engine. Always true: an entry of the largest size fits every budget,
so an idle bookie takes any entry it calls acceptable."""

from pydantic import Field, model_validator

from bookie_server.api.settings import Settings

MIB = 1 << 20
_SPARE = 64 * 1024  # headers and padding around the largest entry
_LITTLE = 4096  # the same without padding


class StorageConfig(Settings):
    """Sizes are bytes, times seconds (or ms where the name says so)."""

    journal_bytes_max: int = Field(
        64 * MIB, gt=0, description="Size of one journal segment, reserved when it is made."
    )
    journal_batch_bytes_max: int = Field(
        8 * MIB, gt=0, description="Most bytes of one group commit; a larger entry goes alone."
    )
    journal_pending_bytes_max: int = Field(
        32 * MIB,
        gt=0,
        description="Adds taken and without a response yet; beyond it the response is BUSY.",
    )
    recovery_reserve_bytes: int = Field(
        20 * MIB,
        ge=0,
        description="What recovery may use beyond each of the budgets; it must hold the largest"
        " entry.",
    )
    page_cache_sync_s: float = Field(
        1.0, gt=0, description="Longest time that entries of page-cache ledgers stay unsynced."
    )
    receive_bytes_max: int = Field(
        128 * MIB,
        gt=0,
        description="Bytes of requests received and not decided; beyond it the response is BUSY.",
    )

    write_cache_bytes: int = Field(
        96 * MIB,
        gt=0,
        description="Entries not yet in an entry log, both halves of the cache together.",
    )
    flush_interval_s: float = Field(
        5.0,
        gt=0,
        description="Longest time that an entry waits in the write cache before a flush begins.",
    )
    flush_chunk_bytes: int = Field(
        4 * MIB, gt=0, description="Bytes that a flush gives to the disk at once."
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
        description="Most bytes in one response, whatever is asked; one entry always fits.",
    )
    read_pending_bytes_max: int = Field(
        64 * MIB,
        gt=0,
        description="Responses being read from disk; beyond it the response is BUSY.",
    )
    retry_after_ms: int = Field(
        20, gt=0, description="How long a caller that got BUSY waits before asking again."
    )
    read_cache_bytes: int = Field(
        48 * MIB,
        ge=0,
        description="Entries read from entry logs and kept, read-ahead included; 0: no read cache.",
    )
    read_ahead_bytes: int = Field(
        4 * MIB,
        ge=0,
        description="Most bytes read beyond what a sequential reader asked for; 0: no read-ahead.",
    )
    place_bytes_min: int = Field(
        32 * 1024,
        ge=0,
        description="Readers on this host are told where entries of so many bytes lie, and read"
        " them there themselves; 0: never.",
    )

    tombstone_sweep_s: float = Field(
        300.0,
        gt=0,
        description="Pause between two looks for ledgers that were deleted, which take no adds.",
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
        description="Pause between two looks at free space; each new file is a look too.",
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
    def _limits_agree(self) -> "StorageConfig":
        """Raises ValueError when the largest entry would not fit a budget."""
        entry = self.entry_bytes_max + _SPARE
        for name, least in (
            ("journal_bytes_max", entry + self.journal_batch_bytes_max),
            ("journal_pending_bytes_max", entry),
            ("write_cache_bytes", 2 * entry),
            ("read_pending_bytes_max", entry),
            ("receive_bytes_max", entry),
            ("recovery_reserve_bytes", self.entry_bytes_max + _LITTLE),
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
        lower = " or ".join(f"{each} ({getattr(self, each)})" for each in others)
        return (
            f"{name} is {getattr(self, name)}, too small for the largest entry: give it at least"
            f" {least}, or lower {lower}"
        )
