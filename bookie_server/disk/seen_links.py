"""The newest links of the metadata store's chain that a bookie has seen, on each of its
directories: by these links the bookie recognises the store (spark_ledger/metadata/chain.py).

Always true: the file with the highest epoch and link counts, so older links in a directory that was
missing for a while have no effect. The file (line_file.py) has the links, and the cluster's epoch
when the bookie saw them:

    spark-ledger-links 1 <cluster id> <epoch> <number>:<token> ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from bookie_server.disk.interface import Disk
from bookie_server.disk.line_file import LineFile, parse_numbers, words_of_numbers


@dataclass(frozen=True, slots=True)
class SeenLinks:
    """The tokens in `links`, by the link's number; empty before the bookie first compared the
    store with its disks."""

    cluster_id: str
    epoch: int = 0
    links: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def newest(self) -> int:
        return max(self.links, default=-1)


def _words_of(seen: SeenLinks) -> list[str]:
    return [seen.cluster_id, str(seen.epoch), *words_of_numbers(seen.links)]


def _parse(words: list[str]) -> SeenLinks:
    cluster_id, epoch, *links = words
    return SeenLinks(cluster_id, int(epoch), MappingProxyType(parse_numbers(links)))


FILE = LineFile("metadata.links", "spark-ledger-links", 4096, _words_of, _parse)


async def read(disks: Sequence[Disk], cluster_id: str) -> SeenLinks:
    """The newest links on the disks."""
    of_cluster = [seen for seen in await FILE.read(disks) if seen.cluster_id == cluster_id]
    return max(
        of_cluster, key=lambda seen: (seen.epoch, seen.newest), default=SeenLinks(cluster_id)
    )
