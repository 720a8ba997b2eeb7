"""The settings of the storage engine; every limit is in bytes. Always true: an entry of the
largest size fits every budget, so an idle bookie takes any entry it calls acceptable."""

from dataclasses import dataclass

MIB = 1 << 20
_SPARE = 64 * 1024  # headers and padding around the largest entry
_LITTLE = 4096  # the same without padding


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Limits of one node's storage, with their defaults; BookieConfig (config.py) says what each
    means."""

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
