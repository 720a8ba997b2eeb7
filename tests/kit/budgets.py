"""What bookies and clients of tests may take: little, so that each budget is used up at times."""

from bookie_server.config import StorageConfig
from spark_ledger.config import ClientConfig
from tests.kit.settings import with_settings

KIB = 1024
NODE = StorageConfig(
    journal_bytes_max=512 * KIB,
    journal_batch_bytes_max=128 * KIB,
    journal_pending_bytes_max=256 * KIB,
    recovery_reserve_bytes=72 * KIB,
    write_cache_bytes=512 * KIB,
    flush_interval_s=5.0,
    flush_chunk_bytes=32 * KIB,
    entry_log_bytes_max=256 * KIB,
    large_entry_bytes=0,
    entry_bytes_max=64 * KIB,
    read_bytes_max=64 * KIB,
    read_pending_bytes_max=256 * KIB,
)
"""A bookie of a test, whose disks have room for all that the test stores."""
ENGINE = StorageConfig(
    journal_bytes_max=96 * KIB,
    journal_batch_bytes_max=16 * KIB,
    journal_pending_bytes_max=128 * KIB,
    recovery_reserve_bytes=32 * KIB,
    write_cache_bytes=160 * KIB,
    flush_interval_s=5.0,
    flush_chunk_bytes=8 * KIB,
    entry_log_bytes_max=24 * KIB,
    entry_bytes_max=4 * KIB,
    read_bytes_max=32 * KIB,
    read_pending_bytes_max=128 * KIB,
    tombstone_sweep_s=7.0,
    gc_interval_s=3.0,
    minor_compaction_share=0.5,
    minor_compaction_s=6.0,
    major_compaction_share=0.9,
    major_compaction_s=11.0,
    read_cache_bytes=48 * KIB,
    read_ahead_bytes=8 * KIB,
)
"""An engine that is stopped at each of its points: few entries fill its logs."""
SMALL_LOGS = with_settings(
    ENGINE, entry_log_bytes_max=9 * KIB, read_cache_bytes=0, read_ahead_bytes=0
)
STORAGE = StorageConfig(
    journal_bytes_max=104 * KIB,
    journal_batch_bytes_max=24 * KIB,
    journal_pending_bytes_max=160 * KIB,
    recovery_reserve_bytes=64 * KIB,
    write_cache_bytes=256 * KIB,
    flush_interval_s=3.0,
    flush_chunk_bytes=16 * KIB,
    entry_log_bytes_max=64 * KIB,
    entry_bytes_max=8 * KIB,
    read_bytes_max=8 * KIB,
    read_pending_bytes_max=160 * KIB,
    tombstone_sweep_s=7.0,
    limbo_check_s=4.0,
    disk_free_bytes_min=192 * KIB,
    disk_reserve_bytes=160 * KIB,
    disk_check_s=2.0,
    place_bytes_min=0,
)
TIGHT = with_settings(
    STORAGE,
    write_cache_bytes=160 * KIB,
    entry_log_bytes_max=16 * KIB,
    read_cache_bytes=16 * KIB,
    read_ahead_bytes=8 * KIB,
    tombstone_sweep_s=2.3,
    gc_interval_s=1.4,
    overreplicated_wait_s=3.7,
    minor_compaction_share=0.5,
    minor_compaction_s=1.7,
    major_compaction_share=0.95,
    major_compaction_s=3.1,
    scrub_interval_s=6.0,
)
"""Small logs and caches; collection, compaction and scrub without a rest."""
LEDGERS = with_settings(
    STORAGE,
    flush_interval_s=20.0,
    tombstone_sweep_s=20.0,
    disk_check_s=20.0,
    gc_interval_s=2.3,
    overreplicated_wait_s=1.9,
)
"""Where ledgers alone matter: what a bookie does by itself is rare, but that it lets copies go."""
CLIENT = ClientConfig(
    inflight_bytes=32 * KIB,
    read_ahead_bytes=16 * KIB,
    read_request_bytes=4 * KIB,
    frame_bytes_max=8 * KIB,
    entry_bytes_max=8 * KIB,
    directory_refresh_s=15.0,
)
SHORT = CLIENT.model_copy(
    update={
        "replica_timeout_s": 1.5,
        "read_timeout_s": 1.5,
        "recovery_timeout_s": 8.0,
        "metadata_timeout_s": 2.5,
        "session_timeout_s": 5.0,
        "spare_grace_s": 3.0,
        "speculative_read_delay_s": 0.1,
        "slow_add_s": 0.7,
    }
)
"""Where ledgers alone matter: a process that waits in vain goes on soon."""
REQUEST_S = 1.5
"""There: what the metadata store does not answer by then has failed."""
