"""Lists of topics as Pulsar's clients ask for them: filtered by a pattern, with a hash.

Always true: a pattern of a client cannot stop the broker. RE2 matches a pattern in a time that is
linear in the lengths of name and pattern; `steps_of` bounds what repetitions make of the pattern;
long lists are matched in a thread, one list at a time.
"""

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import compute

from bookie_server.api.entry import crc32c
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.broker.wire.frames import MESSAGE_BYTES_MAX

PATTERN_CHARS_MAX = 50
"""As Pulsar's default. A client with a longer pattern filters lists by itself."""
STEPS_MAX = 500
"""A pattern of 430 steps takes 0.1 ms a name at worst, a usual one 4 us."""
MATCHED_AT_ONCE_MAX = 50
"""More names are matched in a thread."""
_DOMAIN = re.compile(r"(non-)?persistent://")
_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_PARTITION = re.compile(r"-partition-\d+$")


class PatternRefused(Refusal):
    """The broker does not filter by this pattern; after NotAllowedError the client does."""

    def __init__(self, pattern: str, reason: str) -> None:
        message = f"the pattern '{pattern[:PATTERN_CHARS_MAX]}' {reason}: filter the list yourself"
        super().__init__(ServerError.NOT_ALLOWED, message)


def steps_of(regex: str) -> int:
    """A bound for the length of the pattern with its counted repetitions written out."""
    counts = (max(int(low), int(high or 0)) for low, high in _REPETITION.findall(regex))
    return len(regex) * math.prod(max(1, count) for count in counts)


@dataclass(frozen=True, slots=True)
class TopicsPattern:
    """A regular expression for whole names of topics, without domain and number of partition."""

    regex: str

    @staticmethod
    def parse(text: str) -> "TopicsPattern":
        """Raises PatternRefused."""
        if len(text) > PATTERN_CHARS_MAX:
            reason = f"has {len(text)} characters, at most {PATTERN_CHARS_MAX} are evaluated"
            raise PatternRefused(text, reason)
        if steps_of(text) > STEPS_MAX:
            raise PatternRefused(text, "repeats too much")
        pattern = TopicsPattern(rf"\A(?:{_DOMAIN.sub('', text, count=1)})\z")
        try:
            pattern.matching([""])
        except pa.ArrowInvalid as error:
            raise PatternRefused(text, f"is no regular expression of RE2 ({error})") from error
        return pattern

    def matching(self, topics: Sequence[str]) -> list[str]:
        """Those of these full names of topics and partitions that match, in their order."""
        names = [_PARTITION.sub("", topic.partition("://")[2]).encode() for topic in topics]
        mask = compute.match_substring_regex(pa.array(names, pa.binary()), self.regex)
        return [topic for topic, matches in zip(topics, mask.to_pylist(), strict=True) if matches]


class TopicLists:
    """The lists of one broker."""

    def __init__(self) -> None:
        self._thread = asyncio.Lock()

    async def matching(self, pattern: TopicsPattern, topics: Sequence[str]) -> list[str]:
        """As TopicsPattern.matching."""
        if len(topics) <= MATCHED_AT_ONCE_MAX:
            return pattern.matching(topics)
        async with self._thread:
            return await asyncio.to_thread(pattern.matching, topics)


def topics_hash(topics: Sequence[str]) -> str:
    """The hash by which client and broker see that a list has not changed: CRC32C of the sorted
    names, its lowest byte first, in hexadecimal."""
    return crc32c(",".join(sorted(topics)).encode()).to_bytes(4, "little").hex()


def check_length(topics: list[str]) -> list[str]:
    """The topics. Raises Refusal if no client takes a frame with all of them."""
    size = sum(map(len, topics))
    if size + 3 * len(topics) > MESSAGE_BYTES_MAX:
        message = f"the names of {len(topics)} topics have {size} bytes, which no client takes"
        raise Refusal(ServerError.NOT_ALLOWED, f"{message}: give a pattern that fewer match")
    return topics
