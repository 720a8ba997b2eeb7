"""The settings of the storage engine; every limit is in bytes. Always true: an entry of the
largest size fits every budget, so an idle bookie takes any entry it calls acceptable."""

from dataclasses import dataclass

MIB = 1 << 20
_SPARE = 64 * 1024  # headers and padding around the largest entry


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Limits of one node's storage.

    journal_bytes_max: size of one journal segment; it is reserved when the segment is made.
    journal_batch_bytes_max: most bytes of one group commit (a larger entry goes alone).
    journal_pending_bytes_max: adds taken and not yet answered; beyond it the answer is BUSY.
    recovery_reserve_bytes: what recovery adds may use beyond the pending and cache budgets.
    write_cache_bytes: both halves of the write cache together.
    flush_interval_s: longest time an entry waits in the write cache before a flush begins.
    flush_chunk_bytes: bytes given to the disk at once by a flush.
    entry_log_bytes_max: an entry log is closed with its footer beyond this size.
    entry_bytes_max: largest payload of an entry.
    read_bytes_max: most bytes in one reply, whatever the request asks (one entry always fits).
    read_pending_bytes_max: replies being read from disk; beyond it the answer is BUSY.
    retry_after_ms: how long a refused caller waits before it asks again.
    tombstone_sweep_s: pause between two looks for ledgers that were deleted (tombstones.py).
    """

    journal_bytes_max: int = 64 * MIB
    journal_batch_bytes_max: int = 8 * MIB
    journal_pending_bytes_max: int = 32 * MIB
    recovery_reserve_bytes: int = 8 * MIB
    write_cache_bytes: int = 96 * MIB
    flush_interval_s: float = 5.0
    flush_chunk_bytes: int = 4 * MIB
    entry_log_bytes_max: int = 512 * MIB
    entry_bytes_max: int = 16 * MIB
    read_bytes_max: int = 4 * MIB
    read_pending_bytes_max: int = 64 * MIB
    retry_after_ms: int = 20
    tombstone_sweep_s: float = 300.0

    def __post_init__(self) -> None:
        """Raises ValueError when the largest entry would not fit a budget."""
        entry = self.entry_bytes_max + _SPARE
        for name, budget in (
            ("journal_bytes_max", self.journal_bytes_max - self.journal_batch_bytes_max),
            ("journal_pending_bytes_max", self.journal_pending_bytes_max),
            ("write_cache_bytes / 2", self.write_cache_bytes // 2),
            ("read_pending_bytes_max", self.read_pending_bytes_max),
        ):
            if budget < entry:
                raise ValueError(f"{name} must leave {entry} bytes for an entry, got {budget}")
