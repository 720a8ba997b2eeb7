"""What reclaim does next: which logs go, which are compacted and in which order, and when so much
would go at once that it is taken for a mistake. Only arithmetic; nothing here touches a disk.

Always true: a log in which nothing lives goes without being copied; of the others the emptiest is
compacted first, and only one whose copy fits the free space, so that there is always a next step
even on a full disk.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from bookie_server.log_map import LogMap

MASS_MIN, MASS_SHARE = 10, 0.1
COPY_MARGIN_BYTES = 1 << 20  # header, fillers, footer and map of a copy
_log = logging.getLogger(__name__)


class MassRule:
    """More than a tenth of the ledgers (and more than MASS_MIN) that would go at once go only if
    the look after this one finds the same: a store restored or emptied by mistake says so too."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._before: dict[int, None] = {}

    def allowed(self, ledger_ids: Sequence[int], known: int) -> list[int]:
        """Those of the ledgers, out of `known`, that may go now."""
        before, self._before = self._before, {}
        if len(ledger_ids) <= max(MASS_MIN, known * MASS_SHARE):
            return list(ledger_ids)
        self._before = dict.fromkeys(ledger_ids)
        again = [ledger_id for ledger_id in ledger_ids if ledger_id in before]
        if again:
            _log.info(
                "%d of %d ledgers %s; two looks said so of %d of them: these go",
                *(len(ledger_ids), known, self._what, len(again)),
            )
        if len(again) < len(ledger_ids):
            _log.warning(
                "%d of %d ledgers %s; waits for the next look to confirm",
                *(len(ledger_ids) - len(again), known, self._what),
            )
        return again


def live_share(found: LogMap, dead: Mapping[int, None]) -> float:
    """The part of a log's records that belongs to living ledgers; 0 for a log without any."""
    total = found.record_bytes
    return found.live_bytes(dead) / total if total else 0.0


def to_compact(
    shares: Mapping[int, float], maps: Mapping[int, LogMap], below: float
) -> list[LogMap]:
    """Logs with a live share under `below`, the emptiest first; those with nothing living are
    none of a compaction's business."""
    chosen = [log_id for log_id, share in shares.items() if 0.0 < share < below]
    return [maps[log_id] for log_id in sorted(chosen, key=lambda i: (shares[i], i))]


def fits(live_bytes: int, free_bytes: int) -> bool:
    """Whether the copy of a log with so many living bytes can be written."""
    return live_bytes + COPY_MARGIN_BYTES <= free_bytes


def scrub_rate(
    log_bytes: Iterable[int], interval_s: float, bytes_per_s_max: float, chunk_bytes: int
) -> float:
    """Bytes per second that read all logs once in an interval, as far as the limit allows."""
    total = sum(log_bytes) or chunk_bytes
    return min(float(bytes_per_s_max), total / interval_s)
