"""Which bookies keep a ledger: drawn at random, by free space, on different hosts and, where racks
are known, on different racks.

Always true: the chosen bookies are different candidates, one for a slot; the same generator and the
same request give the same bookies. A suspect (no response lately, or in quarantine) is chosen only
if there are too few others. Racks and hosts should differ *inside write sets*: in a striped ledger
two slots that share no entry may be on one rack or host.

An operator's own policy is a function `policy(request, rng)`, named `module:function` in the
setting `placement`; it is called as `choose` below is, may use `choose`, and is checked
(`resolve`).
"""

import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Literal

from spark_ledger.bookies.directory import BookieInfo
from spark_ledger.config import DEFAULTS
from spark_ledger.errors import BadConfig, LedgerError

STEPS_MAX = 4_000  # of a search; then each slot takes the best bookie that is left


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Slots of one ensemble that need a bookie. Later versions may add fields, never remove any.

    `candidates`: the bookies to choose from; the policy returns their ids. `slots`: the slots to
    fill, ascending. `members`: the bookies that keep the other slots; only their id, address and
    rack are set ("" if not known). `suspects`: ids of bookies, candidates or not, that lately gave
    no response or are in quarantine. `racks` is the setting: with "hard" a slot that cannot have a
    rack of its own in its write sets stays empty.
    """

    candidates: tuple[BookieInfo, ...]
    slots: tuple[int, ...]
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    members: Mapping[int, BookieInfo]
    suspects: tuple[str, ...] = ()
    racks: Literal["soft", "hard"] = DEFAULTS.racks

    def neighbours(self, slot: int) -> Iterator[int]:
        """The slots that share a write set with `slot`."""
        return neighbours(slot, self.ensemble_size, self.write_quorum)


def neighbours(slot: int, ensemble_size: int, write_quorum: int) -> Iterator[int]:
    """The slots that share a write set with `slot`."""
    for other in range(ensemble_size):
        apart = abs(other - slot)
        if 0 < min(apart, ensemble_size - apart) < write_quorum:
            yield other


def clashes(bookie: BookieInfo, others: Iterable[BookieInfo]) -> int:
    """How badly the bookie is placed beside `others`, which share a write set with it: how many are
    on its rack, if the rack is known, plus how many are on its host."""
    placed = [*others]
    racks = sum(bool(bookie.rack) and other.rack == bookie.rack for other in placed)
    return racks + sum(bool(bookie.host) and other.host == bookie.host for other in placed)


# (request, source of chance) -> bookie id for each slot that could be filled
Placement = Callable[[PlacementRequest, random.Random], Mapping[int, str]]


def choose(request: PlacementRequest, rng: random.Random) -> Mapping[int, str]:
    """Different bookies for as many slots as possible. The priorities, in this order: few suspects;
    few clashes (slots of one write set on one rack or host); the order of a random draw, in which
    bookies with more free bytes tend to come first.

    With racks "hard" no write set has two slots of one rack or host, no bookie without a known rack
    is chosen, and a suspect is better than an empty slot.
    """
    return Search(request, rng).run()


class Search:
    """Fills slot after slot, and goes back to an earlier slot if no bookie fits. The bookies of one
    rack and host form two groups, the suspects and the others; within a group the order in which
    bookies were drawn decides."""

    def __init__(self, request: PlacementRequest, rng: random.Random) -> None:
        self._request = request
        self._hard = request.racks == "hard"
        self._neighbours = {slot: tuple(request.neighbours(slot)) for slot in request.slots}
        self._placed: dict[int, BookieInfo] = dict(request.members)
        self._steps = 0
        self._are_suspects_unlimited = False
        usable = [b for b in request.candidates if b.rack or not self._hard]
        drawn = sorted(usable, key=lambda bookie: rng.expovariate(max(1, bookie.free_bytes)))
        suspects = dict.fromkeys(request.suspects)
        self._draws = {bookie.id: (bookie.id in suspects, at) for at, bookie in enumerate(drawn)}
        """By bookie id: whether the bookie is a suspect, and its number in the draw."""
        self._groups: dict[tuple[str, str, bool], list[BookieInfo]] = {}
        for bookie in reversed(drawn):
            group = bookie.rack, bookie.host, bookie.id in suspects
            self._groups.setdefault(group, []).append(bookie)
        self._drop_surplus_hosts()

    def _drop_surplus_hosts(self) -> None:
        """Drop groups that cannot be needed. Of each rack keep only as many hosts as there are
        slots to fill, those that were drawn first; suspects and other bookies count separately.
        Hosts of members stay."""
        hosts = {bookie.host for bookie in self._placed.values()}
        kept: Counter[tuple[str, bool]] = Counter()
        for group in sorted(
            self._groups, key=lambda group: self._draw_of_next(self._groups[group])
        ):
            rack, host, suspect = group
            kept[rack, suspect] += host not in hosts
            if host not in hosts and kept[rack, suspect] > len(self._request.slots):
                del self._groups[group]

    def run(self) -> dict[int, str]:
        """The bookie of each slot that can be filled."""
        slots = self._request.slots
        suspect_count = sum(suspect for suspect, _ in self._draws.values())
        if len(self._draws) < len(slots):
            return self._one_by_one()
        needed = max(0, len(slots) - (len(self._draws) - suspect_count))
        clashes_max = 0 if self._hard else 2 * len(slots) * self._request.ensemble_size
        # With racks "hard", more suspects than needed are better than an empty slot.
        for suspects_max in (needed, suspect_count) if self._hard else (needed,):
            self._are_suspects_unlimited, self._steps = suspects_max == suspect_count, 0
            for clashes_allowed in range(clashes_max + 1):
                if self._fill(0, suspects_max, clashes_allowed):
                    return self._chosen()
                if self._steps > STEPS_MAX:
                    break
        return self._one_by_one()

    def _fill(self, at: int, suspects_left: int, clashes_left: int) -> bool:
        """Fill the slots from the `at`-th on, with at most `suspects_left` suspects and
        `clashes_left` clashes."""
        self._steps += 1
        if at == len(self._request.slots):
            return True
        slot = self._request.slots[at]
        for group in self._alternatives():
            bookie = group.pop()
            suspects_after = suspects_left - self._draws[bookie.id][0]
            clashes_after = clashes_left - self._clashes(slot, bookie)
            if suspects_after >= 0 and clashes_after >= 0 and self._steps <= STEPS_MAX:
                self._placed[slot] = bookie
                if self._fill(at + 1, suspects_after, clashes_after):
                    return True
                del self._placed[slot]
            group.append(bookie)
        return False

    def _one_by_one(self) -> dict[int, str]:
        """Fill as many slots as possible without going back."""
        for slot in self._request.slots:
            groups = self._alternatives()
            if self._hard:
                groups = [group for group in groups if not self._clashes(slot, group[-1])]
            if groups:
                best = min(groups, key=lambda group: self._objections(slot, group[-1]))
                self._placed[slot] = best.pop()
        return self._chosen()

    def _alternatives(self) -> list[list[BookieInfo]]:
        """The groups to try, in order: other bookies before suspects, then by the draw. From each
        rack and host come the group of suspects and that of others; only the first of the two if
        suspects are unlimited. Hosts of a rack that have no placed bookie are alike: they count as
        one host, from which the groups that were drawn first come."""
        left = sorted(filter(None, self._groups.values()), key=self._draw_of_next)
        hosts = {bookie.host for bookie in self._placed.values()}
        first: dict[tuple[str, str | None, bool], list[BookieInfo]] = {}
        for group in left:
            rack, host = group[-1].rack, group[-1].host
            suspect = not self._are_suspects_unlimited and self._draws[group[-1].id][0]
            first.setdefault((rack, host if host in hosts else None, suspect), group)
        return list(first.values())

    def _draw_of_next(self, group: list[BookieInfo]) -> tuple[bool, int]:
        """The draw of the bookie that the group gives next: its last one."""
        return self._draws[group[-1].id]

    def _objections(self, slot: int, bookie: BookieInfo) -> tuple[bool, int, int]:
        suspect, draw_number = self._draws[bookie.id]
        return suspect, self._clashes(slot, bookie), draw_number

    def _clashes(self, slot: int, bookie: BookieInfo) -> int:
        placed = map(self._placed.get, self._neighbours[slot])
        return clashes(bookie, (other for other in placed if other is not None))

    def _chosen(self) -> dict[int, str]:
        return {slot: self._placed[slot].id for slot in self._request.slots if slot in self._placed}


# -- an operator's own policy ------------------------------------------------------------------


def resolve(name: str) -> Placement:
    """The policy that `module:function` names; its result is checked at each call.

    Raises BadConfig if there is no such function. A call of the policy raises BadConfig if the
    function raises, if it returns no mapping, a bookie that is no candidate, or a bookie twice, and
    if it fills a slot that the request does not name. A LedgerError of the function is passed on.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise _bad_config(name, "it is no module:function")
    try:
        policy: object = import_module(module)
    except Exception as failure:
        raise _bad_config(name, f"{module} cannot be imported: {failure!r}") from failure
    for part in attribute.split("."):
        if not hasattr(policy, part):
            raise _bad_config(name, f"{module} has no {attribute}")
        policy = getattr(policy, part)
    if not callable(policy):
        raise _bad_config(name, f"it is a {type(policy).__name__}, no function")
    if iscoroutinefunction(policy):
        raise _bad_config(name, "it is an async function; a policy returns its choice at once")
    return choose if policy is choose else checked(name, policy)


def checked(name: str, policy: Placement) -> Placement:
    """`policy`, whose result is checked at each call; errors use the name."""

    def place(request: PlacementRequest, rng: random.Random) -> Mapping[int, str]:
        try:
            chosen = policy(request, rng)
        except LedgerError:
            raise
        except Exception as failure:
            raise _bad_config(name, f"it raised {failure!r}") from failure
        if isinstance(chosen, Coroutine):
            chosen.close()
        if not isinstance(chosen, Mapping):
            raise _bad_config(
                name, f"it returned a {type(chosen).__name__}, not a mapping of slots to ids"
            )
        _check(name, request, chosen)
        return {slot: chosen[slot] for slot in request.slots if slot in chosen}

    return place


def _check(name: str, request: PlacementRequest, chosen: Mapping[int, str]) -> None:
    if any(isinstance(bookie, BookieInfo) for bookie in chosen.values()):
        raise _bad_config(name, "it returned BookieInfo objects, ids are expected: bookie.id")
    candidates = {bookie.id: None for bookie in request.candidates}
    non_candidates = [
        repr(bookie)
        for bookie in chosen.values()
        if not isinstance(bookie, str) or bookie not in candidates
    ]
    if non_candidates:
        raise _bad_config(
            name, f"it returned bookies that are no candidates: {', '.join(non_candidates)}"
        )
    if len({*chosen.values()}) < len(chosen):
        raise _bad_config(name, f"it returned a bookie twice: {', '.join(sorted(chosen.values()))}")
    slots = [repr(slot) for slot in chosen if slot not in request.slots]
    if slots:
        raise _bad_config(name, f"it filled slots that it was not asked for: {', '.join(slots)}")


def _bad_config(name: str, why: str) -> BadConfig:
    return BadConfig(
        f"placement = {name!r}: {why}",
        "Name a function as spark_ledger.ledger.placement describes, or leave the setting out.",
    )
