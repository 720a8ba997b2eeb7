"""The settings of the storage engine; every limit is in bytes. Always true: an entry of the
largest size fits every budget, so an idle bookie takes any entry it calls acceptable."""

from dataclasses import dataclass

MIB = 1 << 20
_SPARE = 64 * 1024  # headers and padding around the largest entry
_LITTLE = 4096  # the same without padding


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Limits of one node's storage.

    journal_bytes_max: size of one journal segment; it is reserved when the segment is made.
    journal_batch_bytes_max: most bytes of one group commit (a larger entry goes alone).
    journal_pending_bytes_max: adds taken and not yet answered; beyond it the answer is BUSY.
    recovery_reserve_bytes: what recovery may use beyond each of the budgets; holds any entry.
    write_cache_bytes: both halves of the write cache together.
    flush_interval_s: longest time an entry waits in the write cache before a flush begins.
    flush_chunk_bytes: bytes given to the disk at once by a flush.
    entry_log_bytes_max: an entry log is closed with its footer beyond this size.
    large_entry_bytes: entries of that size are written once, straight to an entry log; 0: none.
    entry_bytes_max: largest payload of an entry.
    read_bytes_max: most bytes in one reply, whatever the request asks (one entry always fits).
    read_pending_bytes_max: replies being read from disk; beyond it the answer is BUSY.
    retry_after_ms: how long a refused caller waits before it asks again.
    tombstone_sweep_s: pause between two looks for ledgers that were deleted (tombstones.py).
    page_cache_sync_s: longest time that entries of page-cache ledgers stay unsynced.
    receive_bytes_max: bytes of requests received and not decided; beyond it the answer is BUSY.
    read_cache_bytes: entries read from the entry logs and kept, read-ahead included; 0: none.
    read_ahead_bytes: most bytes read beyond what a sequential reader asked for; 0: none.
    place_bytes_min: readers on this host are told where entries of that size lie, and read them
        there themselves; 0: never.
    gc_interval_s: pause between two passes that reclaim space.
    overreplicated_wait_s: pause between two looks for closed ledgers whose copies are surplus.
    minor_compaction_share: a log with a smaller live share is compacted by a minor compaction.
    minor_compaction_s: pause between two minor compactions.
    major_compaction_share: a log with a smaller live share is compacted by a major compaction.
    major_compaction_s: pause between two major compactions.
    compaction_bytes_per_s: most bytes that compaction copies in a second.
    scrub_interval_s: time in which the scrub reads every entry log once.
    scrub_bytes_per_s: most bytes that the scrub reads in a second.
    disk_usage_high: used share of a directory's disk beyond which it is full.
    disk_usage_low: used share below which it is not full any more.
    disk_free_bytes_min: free bytes below which a disk is full, whatever its share.
    disk_reserve_bytes: reserved in each directory for fences, recovery adds, compaction.
    disk_check_s: pause between two looks at the free space (each new file looks too).
    disk_hang_s: longest time a call to a disk or index may take; then its directory has failed.
    limbo_check_s: pause between two looks at what the node lists as in limbo.
    """

    journal_bytes_max: int = 64 * MIB
    journal_batch_bytes_max: int = 8 * MIB
    journal_pending_bytes_max: int = 32 * MIB
    recovery_reserve_bytes: int = 20 * MIB
    write_cache_bytes: int = 96 * MIB
    flush_interval_s: float = 5.0
    flush_chunk_bytes: int = 4 * MIB
    entry_log_bytes_max: int = 512 * MIB
    large_entry_bytes: int = 32 * 1024
    entry_bytes_max: int = 16 * MIB
    read_bytes_max: int = 4 * MIB
    read_pending_bytes_max: int = 64 * MIB
    retry_after_ms: int = 20
    tombstone_sweep_s: float = 300.0
    page_cache_sync_s: float = 1.0
    receive_bytes_max: int = 128 * MIB
    read_cache_bytes: int = 48 * MIB
    read_ahead_bytes: int = 4 * MIB
    place_bytes_min: int = 32 * 1024
    gc_interval_s: float = 60.0
    overreplicated_wait_s: float = 3600.0
    minor_compaction_share: float = 0.2
    minor_compaction_s: float = 3600.0
    major_compaction_share: float = 0.5
    major_compaction_s: float = 86_400.0
    compaction_bytes_per_s: int = 32 * MIB
    scrub_interval_s: float = 604_800.0
    scrub_bytes_per_s: int = 8 * MIB
    disk_usage_high: float = 0.95
    disk_usage_low: float = 0.90
    disk_free_bytes_min: int = 256 * MIB
    disk_reserve_bytes: int = 32 * MIB
    disk_check_s: float = 10.0
    disk_hang_s: float = 30.0
    limbo_check_s: float = 30.0

    def __post_init__(self) -> None:
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

    def _too_small(self, name: str, least: int) -> str:
        others = ["entry_bytes_max"]
        if name == "journal_bytes_max":
            others.append("journal_batch_bytes_max")
        lower = " or ".join(f"{each} ({getattr(self, each)})" for each in others)
        return (
            f"{name} is {getattr(self, name)}, too small for the largest entry: give it at least"
            f" {least}, or lower {lower}"
        )
