"""The chain of links by which a bookie's disk knows the metadata store again.

A link is a number and a random token. The store keeps the chain in one node; the elected process of
maintenance appends a link with each pass, a bookie where none came for BOOKIE_EXTENDS_S, and
`spark-ledger metadata accept`. Each bookie keeps the newest links that it saw on its disks
(bookie_server/disk/seen_links.py). A store in whose chain such a link is missing is older than the
disk, or another that began from the same copy.

Always true: numbers rise by one and are never given twice in one store; which links are kept
follows from their numbers and the newest one alone (`is_kept`), so a disk knows whether a link must
be there: each for four hours, each 16th (a quarter of an hour) for two days, each 256th (4 hours)
for 30 days, each 4,096th (3 days) for 400 days. A bookie keeps the newest link of each of these
kinds (`newest_of_each_kind`). The node stays below 20 KiB.

    {"format":1,"links":[[0,"8f3c..."],[256,"..."],...]}      numbers rise; the last is the newest
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    Versioned,
)
from spark_ledger.metadata.store_calls import read

FORMAT = 1
EXTEND_S, BOOKIE_EXTENDS_S = 45.0, 180.0  # a pass of maintenance is 60 s after the one before
_A_DAY = 24 * 60
_KINDS = ((1, _A_DAY // 6), (16, 2 * _A_DAY), (256, 30 * _A_DAY), (4096, 400 * _A_DAY))
"""(each so many-th link, while it is not more than so many numbers behind the newest)"""
_TOKEN_BYTES = 6


class BadChain(ValueError):
    """Bytes that are no chain, or one of a format this version does not know."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The links that are kept, by number; there is one at least."""

    links: Mapping[int, str]

    @property
    def newest(self) -> int:
        return max(self.links)


def new_token() -> str:
    return secrets.token_hex(_TOKEN_BYTES)


def is_kept(number: int, newest: int) -> bool:
    """Whether a chain that ends with link `newest` keeps this one."""
    return any(number % step == 0 and newest - number <= reach for step, reach in _KINDS)


def extended(chain: Chain | None, token: str) -> Chain:
    """The chain with one more link, without those that are not kept any more."""
    if chain is None:
        return Chain(MappingProxyType({0: token}))
    newest = chain.newest + 1
    kept = {number: old for number, old in chain.links.items() if is_kept(number, newest)}
    return Chain(MappingProxyType({**kept, newest: token}))


def newest_of_each_kind(chain: Chain) -> dict[int, str]:
    """What a bookie keeps of it."""
    numbers = {max((n for n in chain.links if n % step == 0), default=-1) for step, _ in _KINDS}
    return {number: chain.links[number] for number in sorted(numbers) if number in chain.links}


def missing(seen: Mapping[int, str], chain: Chain | None) -> int | None:
    """The newest link that was seen and is not in the chain though it should be; None: the chain
    goes on from what was seen, as far as links so old are kept."""
    for number in sorted(seen, reverse=True):
        if chain is None or number > chain.newest:
            return number
        if is_kept(number, chain.newest) and chain.links.get(number) != seen[number]:
            return number
    return None


def encode(chain: Chain) -> bytes:
    plain = {"format": FORMAT, "links": [[n, chain.links[n]] for n in sorted(chain.links)]}
    return json.dumps(plain, separators=(",", ":")).encode()


def decode(value: bytes) -> Chain:
    """Raises BadChain."""
    try:
        plain = json.loads(value)
        if plain["format"] != FORMAT:
            raise BadChain(f"the chain has format {plain['format']}")
        links = {int(number): str(token) for number, token in plain["links"]}
        if not links or list(links) != sorted(links) or min(links) < 0:
            raise BadChain("the numbers of its links do not rise")
        return Chain(MappingProxyType(links))
    except errors.MALFORMED as error:
        raise BadChain(f"not a chain: {error}") from error


def of_node(node: Versioned | None) -> Chain | None:
    """Raises BadChain."""
    return None if node is None else decode(node.value)


async def extend(store: MetadataStore, node: Versioned | None) -> int | None:
    """Append a link to the chain of this node, unless it has changed; returns the version that it
    has then. None: it has changed, or the response was lost: the next look sees what is there.
    Raises BadChain, StoreUnavailable."""
    value = encode(extended(of_node(node), new_token()))
    try:
        if node is None:
            await store.create(paths.CHAIN, value)
            return 0
        return await store.set(paths.CHAIN, value, node.version)
    except (BadVersion, NodeExists, NoNode, OutcomeUnknown):
        return None


class Extender:
    """Of one process: it appends a link where it saw no new one for `after_s`. Not to be used while
    the store is held, or before a disk was compared with it."""

    def __init__(self, store: MetadataStore, after_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._after_s = after_s
        self._clock = clock
        self._version: int | None = None
        self._since_s = 0.0

    async def once(self) -> None:
        """Raises errors.UnsupportedFormat, StoreError."""
        node = await read(self._store, paths.CHAIN)
        now_s = self._clock()
        try:
            if node is not None and node.version != self._version:
                self._version, self._since_s = node.version, now_s
            elif node is None or now_s - self._since_s >= self._after_s:
                self._version, self._since_s = await extend(self._store, node), now_s
        except BadChain as damage:
            raise errors.UnsupportedFormat(f"{paths.CHAIN}: {damage}") from damage


def loop_clock() -> float:
    return asyncio.get_running_loop().time()
