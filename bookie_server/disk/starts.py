"""The starts of a bookie, on each of its directories: a number and a random token for each start.
By them the bookie sees whether a start in the metadata store was its own (serve/twin.py).

Always true: a token in one directory counts even if others lack it, as this bookie drew it, or the
bookie of which these directories are a copy. The words of the file (line_file.py), of the KEPT
newest starts:

    spark-ledger-starts 1 <bookie id> <number>:<token> ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bookie_server.disk.interface import Disk
from bookie_server.disk.line_file import LineFile, of_pairs, pairs_of

KEPT = 100


@dataclass(frozen=True, slots=True)
class Starts:
    """`tokens`: by number; empty before the first start that keeps them."""

    bookie_id: str
    tokens: Mapping[int, str]

    @property
    def newest(self) -> int:
        return max(self.tokens, default=0)

    def knows(self, number: int, token: str) -> bool:
        """Whether that was a start of these directories; a start before the oldest that is kept
        counts as theirs."""
        return token in self.tokens.values() or (bool(self.tokens) and number < min(self.tokens))

    def with_start(self, number: int, token: str) -> "Starts":
        every = {**self.tokens, number: token}
        return Starts(self.bookie_id, {n: every[n] for n in sorted(every)[-KEPT:]})


FILE = LineFile(
    "bookie.starts",
    "spark-ledger-starts",
    64 * 1024,
    lambda starts: [starts.bookie_id, *pairs_of(starts.tokens)],
    lambda words: Starts(words[0], of_pairs(words[1:])),
)


async def read(disks: Sequence[Disk], bookie_id: str) -> Starts:
    """The starts on all disks together."""
    tokens: dict[int, str] = {}
    for starts in sorted(await FILE.read(disks), key=lambda starts: starts.newest):
        if starts.bookie_id == bookie_id:
            tokens |= starts.tokens
    return Starts(bookie_id, tokens)
