"""The chain of links by which a bookie recognises a metadata store that went back in time.

A link is a number and a random token. The store keeps the chain in one node. Three writers append
links: the elected process of maintenance with each pass, a bookie if the chain got no link for
BOOKIE_EXTENDS_S, and `spark-ledger metadata accept`. Each bookie keeps on its disks the newest
links that it saw (bookie_server/disk/seen_links.py). If the store's chain lacks such a link, the
store is older than the disk, or another store that began from the same copy.

Always true: numbers rise by one, and no store uses a number twice. The number of a link and the
newest number alone decide whether the link is kept (`is_kept`), so a bookie knows which links must
be in the chain: every link for four hours, each 16th (a quarter of an hour) for two days, each
256th (4 hours) for 30 days, each 4,096th (3 days) for 400 days. A bookie keeps the newest link of
each of these kinds (`newest_of_each_kind`). The node stays below 20 KiB.

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
EXTEND_S, BOOKIE_EXTENDS_S = 45.0, 180.0  # a pass of maintenance comes every 60 s
_A_DAY = 24 * 60
_KINDS = ((1, _A_DAY // 6), (16, 2 * _A_DAY), (256, 30 * _A_DAY), (4096, 400 * _A_DAY))
"""(step, reach): each `step`-th link is kept while the newest link is at most `reach` numbers
later."""
_TOKEN_BYTES = 6


class BadChain(ValueError):
    """A malformed chain, or a chain of a format that this version does not know."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The kept links, by number; there is at least one link."""

    links: Mapping[int, str]

    @property
    def newest(self) -> int:
        return max(self.links)


def new_token() -> str:
    return secrets.token_hex(_TOKEN_BYTES)


def is_kept(number: int, newest: int) -> bool:
    """Whether a chain that ends with link `newest` keeps link `number`."""
    return any(number % step == 0 and newest - number <= reach for step, reach in _KINDS)


def with_link(chain: Chain | None, token: str) -> Chain:
    """The chain with one more link, without the links that are no longer kept then."""
    if chain is None:
        return Chain(MappingProxyType({0: token}))
    newest = chain.newest + 1
    kept = {
        number: old_token for number, old_token in chain.links.items() if is_kept(number, newest)
    }
    return Chain(MappingProxyType({**kept, newest: token}))


def newest_of_each_kind(chain: Chain) -> dict[int, str]:
    """The links of the chain that a bookie keeps."""
    numbers = {max((n for n in chain.links if n % step == 0), default=-1) for step, _ in _KINDS}
    return {number: chain.links[number] for number in sorted(numbers) if number in chain.links}


def missing_link(seen: Mapping[int, str], chain: Chain | None) -> int | None:
    """The newest link of `seen` that the chain should have and lacks; None if the chain has all
    that it still keeps of them."""
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


def chain_of_node(node: Versioned | None) -> Chain | None:
    """Raises BadChain."""
    return None if node is None else decode(node.value)


async def extend(store: MetadataStore, node: Versioned | None) -> int | None:
    """Append a link to the chain of this node; returns the node's new version. Returns None if
    another process changed the node or the response was lost; the next read shows the outcome.
    Raises BadChain, StoreUnavailable."""
    value = encode(with_link(chain_of_node(node), new_token()))
    try:
        if node is None:
            await store.create(paths.CHAIN, value)
            return 0
        return await store.set(paths.CHAIN, value, node.version)
    except (BadVersion, NodeExists, NoNode, OutcomeUnknown):
        return None


class Extender:
    """Appends a link if this process saw no new link for `after_s`. Do not use it while the store
    is held, nor at a bookie before the store was compared with the bookie's disks."""

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
