"""Lists of topics, as Pulsar's clients ask for them: filtered by a pattern, with a hash. A client
may ask once, or watch the list and get its changes.

Always true: there is one watch in the store for a namespace, however many clients watch its topics.
After a change in the store, each list is brought up to date, and then its watches send the change.
A pattern of a client cannot stop the broker. RE2 matches a name in a time that is linear in the
lengths of name and pattern; `steps_of` bounds the length of the pattern with its repetitions
written out; and long lists are matched in a thread, one list at a time.
"""

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import compute

from bookie_server.api.entry import crc32c
from spark_ledger import errors
from spark_ledger.async_tasks import woken
from spark_ledger.broker.catalog import names_of
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.broker.wire.frames import MESSAGE_BYTES_MAX
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.arrow_arrays import of_list
from spark_ledger.topic.log.names import TopicName, parse_namespace
from spark_ledger.topic.upkeep.namespaces import Namespaces

PATTERN_CHARS_MAX = 50
"""As Pulsar's default. A client with a longer pattern filters lists by itself."""
STEPS_MAX = 500
"""A pattern of 430 steps takes 0.1 ms for a name at worst; a usual pattern takes 4 us."""
MATCHED_AT_ONCE_MAX = 50
"""More names are matched in a thread."""
WATCHES_MAX = 1_000
NAMES_MAX = 2_000_000
"""How many watches a broker has, and how many names the lists of their patterns have (8 bytes each,
since lists share names). Beyond that, clients ask for lists again and again, as with a long
pattern."""
REREAD_S, READ_GAP_S, RETRY_S = 60.0, 0.2, 1.0
_DOMAIN = re.compile(r"(non-)?persistent://")
_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_PARTITION = re.compile(r"-partition-\d+$")
_log = logging.getLogger(__name__)


class PatternRefused(Refusal):
    """The broker does not filter by this pattern. After NotAllowedError the client filters the list
    itself."""

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
        mask = compute.match_substring_regex(of_list(names, pa.binary()), self.regex)
        return [topic for topic, matches in zip(topics, mask.to_pylist(), strict=True) if matches]


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a list since the list `before`."""

    before: list[str]
    new: list[str]
    deleted: list[str]


class MatchingTopics:
    """The topics of a namespace that match one pattern, for all watches with this pattern.
    A change replaces `topics`. `watches` is the number of watches."""

    def __init__(self, pattern: TopicsPattern, topics: list[str]) -> None:
        self.pattern = pattern
        self.topics = topics
        self.watches = 0
        self._changed = asyncio.Event()  # set by the next change
        self._last = Change(topics, [], [])
        self._hash: str | None = None

    @property
    def hash(self) -> str:
        self._hash = self._hash or topics_hash(self.topics)
        return self._hash

    def change(self, new: list[str], deleted: frozenset[str]) -> None:
        """`new` are topics that match; `deleted` may also have topics that do not match."""
        gone = [topic for topic in self.topics if topic in deleted] if deleted else []
        if not new and not gone:
            return
        self._last = Change(self.topics, new, gone)
        self.topics = [topic for topic in self.topics if topic not in deleted] + new
        self._hash = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def change_since(self, before: list[str]) -> Change:
        """Wait until `topics` is another list than `before`; returns the change from `before`."""
        while self.topics is before:
            await self._changed.wait()
        if self._last.before is before:
            return self._last
        old, now = frozenset(before), frozenset(self.topics)
        return Change(before, sorted(now - old), sorted(old - now))


class WatchedNamespace:
    """The topics of a namespace that clients watch: one watch in the store, however many clients.

    A topic that got more partitions, or was deleted and made again at once, is noticed after
    REREAD_S, also while other topics come and go."""

    def __init__(self, client: TopicClient, lists: "TopicLists", namespace: str) -> None:
        self.patterns: dict[str, MatchingTopics] = {}
        self.topics: list[str] = []
        """The names that clients use; a change replaces the list."""
        self._client, self._lists, self._namespace = client, lists, namespace
        self._names_of: dict[str, list[str]] = {}  # by topic
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises errors.NamespaceNotFound, errors.Unavailable."""
        await Namespaces(self._client.store, self._client.rng).check(self._namespace)
        await self._read(every_record=True)
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def matching(self, pattern: TopicsPattern) -> MatchingTopics:
        """The topics that match; they are kept up to date as long as they are in `patterns`."""
        while pattern.regex not in self.patterns:
            topics = self.topics
            matching = MatchingTopics(pattern, await self._lists.matching(pattern, topics))
            if topics is self.topics:
                self.patterns.setdefault(pattern.regex, matching)
        return self.patterns[pattern.regex]

    async def _follow(self) -> None:
        now_s = asyncio.get_running_loop().time
        reread_s = now_s() + REREAD_S
        while True:
            is_change = await woken(self._changed, max(0.0, reread_s - now_s()))
            try:
                every_record = not is_change or now_s() >= reread_s
                await self._read(every_record=every_record)
                if every_record:
                    reread_s = now_s() + REREAD_S
            except (errors.LedgerError, StoreError) as error:
                _log.warning("the topics of %s cannot be listed now: %s", self._namespace, error)
                self._changed.set()
                await asyncio.sleep(RETRY_S)
            except Exception:
                _log.exception("the topics of %s cannot be listed now: a defect", self._namespace)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(READ_GAP_S)

    async def _read(self, *, every_record: bool) -> None:
        """Read the names of topics, and the records of new topics or of all topics."""
        self._changed.clear()
        tenant, namespace = parse_namespace(self._namespace)
        names = await self._client.topics.names_in(self._namespace, self._changed.set)
        unread = [name for name in names if every_record or name not in self._names_of]
        topics = await self._client.topics.listed(
            [TopicName(tenant, namespace, name) for name in unread]
        )
        read = {topic.name.name: names_of(topic) for topic in topics}
        before = self._names_of
        self._names_of = {
            name: read[name] if name in read else before[name]
            for name in names
            if name in read or name in before
        }
        old = self.topics
        self.topics = [topic for topics in self._names_of.values() for topic in topics]
        new = sorted(frozenset(self.topics).difference(old))
        deleted = frozenset(old).difference(self.topics)
        for matching in list(self.patterns.values()):
            matching.change(await self._lists.matching(matching.pattern, new), deleted)
            await asyncio.sleep(0)


class TopicLists:
    """The lists of one broker."""

    def __init__(self, client: TopicClient) -> None:
        self._client = client
        self._thread, self._opening = asyncio.Lock(), asyncio.Lock()
        self.namespaces: dict[str, WatchedNamespace] = {}
        """The namespaces that clients watch."""
        self.watches = 0

    async def watch(self, namespace: str, pattern_text: str) -> MatchingTopics:
        """The topics that match, followed until `leave`. Raises Refusal, errors.NamespaceNotFound,
        errors.Unavailable."""
        pattern = TopicsPattern.parse(pattern_text)
        async with self._opening:
            self._drop_unused()
            if self.watches >= WATCHES_MAX or self._names_kept > NAMES_MAX:
                raise PatternRefused(pattern_text, "is one of too many watches")
            watched = self.namespaces.get(namespace)
            if watched is None:
                watched = WatchedNamespace(self._client, self, namespace)
                await watched.start()
                self.namespaces[namespace] = watched
            matching = await watched.matching(pattern)
            check_length(matching.topics)
            matching.watches += 1
            self.watches += 1
            return matching

    def leave(self, matching: MatchingTopics) -> None:
        """A watch of these topics has ended."""
        matching.watches -= 1
        self.watches -= 1
        if not self._opening.locked():  # otherwise the next call of `watch` does this
            self._drop_unused()

    def _drop_unused(self) -> None:
        for namespace, watched in list(self.namespaces.items()):
            used = {regex: m for regex, m in watched.patterns.items() if m.watches}
            watched.patterns = used
            if not used:
                watched.stop()
                del self.namespaces[namespace]

    @property
    def _names_kept(self) -> int:
        lists = (m.topics for w in self.namespaces.values() for m in w.patterns.values())
        return sum(map(len, lists))

    def stop(self) -> None:
        for watched in self.namespaces.values():
            watched.stop()

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
