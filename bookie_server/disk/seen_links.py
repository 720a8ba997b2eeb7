"""The newest links of the metadata store's chain that a bookie saw, on each of its directories: by
them it recognises the store (spark_ledger/metadata/chain.py).

Always true: of the directories' files the one with the highest epoch and link counts, so a
directory that was away brings no older one back. The words of the file (line_file.py), with the
cluster's epoch when the links were seen:

    spark-ledger-links 1 <cluster id> <epoch> <number>:<token> ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from bookie_server.disk.interface import Disk
from bookie_server.disk.line_file import LineFile, of_pairs, pairs_of


@dataclass(frozen=True, slots=True)
class SeenLinks:
    """`links`: number to token; empty before the first look at the store."""

    cluster_id: str
    epoch: int = 0
    links: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def newest(self) -> int:
        return max(self.links, default=-1)


def _words_of(seen: SeenLinks) -> list[str]:
    return [seen.cluster_id, str(seen.epoch), *pairs_of(seen.links)]


def _of_words(words: list[str]) -> SeenLinks:
    cluster_id, epoch, *links = words
    return SeenLinks(cluster_id, int(epoch), MappingProxyType(of_pairs(links)))


FILE = LineFile("metadata.links", "spark-ledger-links", 4096, _words_of, _of_words)


async def read(disks: Sequence[Disk], cluster_id: str) -> SeenLinks:
    """The newest links on the disks."""
    ours = [seen for seen in await FILE.read(disks) if seen.cluster_id == cluster_id]
    return max(ours, key=lambda seen: (seen.epoch, seen.newest), default=SeenLinks(cluster_id))
