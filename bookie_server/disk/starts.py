"""The starts of a bookie, on each of its directories: a number and a random token for each start.
By the tokens the bookie sees whether a start in the metadata store was its own (serve/twin.py).

Always true: a token counts if any directory has it: then this bookie drew the token, or the bookie
drew it of which these directories are a copy. The file (line_file.py) has the STARTS_KEPT newest
starts:

    spark-ledger-starts 1 <bookie id> <number>:<token> ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bookie_server.disk.interface import Disk
from bookie_server.disk.line_file import LineFile, parse_numbers, words_of_numbers

STARTS_KEPT = 100


@dataclass(frozen=True, slots=True)
class Starts:
    """The `tokens`, by the number of the start; empty before the first start that writes them."""

    bookie_id: str
    tokens: Mapping[int, str]

    @property
    def newest(self) -> int:
        return max(self.tokens, default=0)

    def knows(self, number: int, token: str) -> bool:
        """Whether this was a start of these directories. Any start before the oldest start in the
        file counts as a start of these directories."""
        return token in self.tokens.values() or (bool(self.tokens) and number < min(self.tokens))

    def with_start(self, number: int, token: str) -> "Starts":
        tokens = {**self.tokens, number: token}
        return Starts(self.bookie_id, {n: tokens[n] for n in sorted(tokens)[-STARTS_KEPT:]})


FILE = LineFile(
    "bookie.starts",
    "spark-ledger-starts",
    64 * 1024,
    lambda starts: [starts.bookie_id, *words_of_numbers(starts.tokens)],
    lambda words: Starts(words[0], parse_numbers(words[1:])),
)


async def read(disks: Sequence[Disk], bookie_id: str) -> Starts:
    """The starts on all disks together."""
    tokens: dict[int, str] = {}
    for starts in sorted(await FILE.read(disks), key=lambda starts: starts.newest):
        if starts.bookie_id == bookie_id:
            tokens |= starts.tokens
    return Starts(bookie_id, tokens)
