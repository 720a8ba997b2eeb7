"""What a restarted bookie must know still: it is asked, past the network, for every fence that it
replied to and every entry that it acknowledged (invariants 13, 15, 16).

Always true: an answer that is an error of the node says nothing of what it knows, and decides
nothing: a node whose disk fails in that moment is about to exit, and the next start is asked.
"""

from typing import TYPE_CHECKING

from bookie_server.api import messages as m
from bookie_server.api.status import Meaning, meaning
from bookie_server.bookie import Bookie
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import derive
from tests.simulation import invariants

if TYPE_CHECKING:
    from tests.simulation.world import BookieNode

PASSWORD = b"of every ledger that has one"


async def check(node: "BookieNode", bookie: Bookie) -> None:
    """Ask the bookie, which runs on the node since just now."""
    mine = node.world.ghost.bookie(node.bookie_id)
    every = bookie.ledgers.every_ledger_state().limbo == "lost"  # only a new directory is there
    for ledger_id in mine.fence_replied if not (mine.rotten or every) else ():
        if _exists(node, ledger_id):  # the others are in limbo, and take no adds
            request = m.ReadLacRequest(node.bookie_id, ledger_id, token=_token(node, ledger_id))
            answer = await bookie.handle(request)
            assert isinstance(answer, m.ReadLacResponse)
            if meaning(answer.status) is not Meaning.UNKNOWN:
                node.judge(invariants.a_fence_survives_a_crash, ledger_id, answer.fenced)
    spans: dict[int, list[int]] = {}
    for ledger_id, entry_id in mine.stored:
        spans.setdefault(ledger_id, []).append(entry_id)
    for ledger_id, entries in spans.items():
        if _exists(node, ledger_id):
            await _check_entries(node, bookie, ledger_id, sorted(entries))


async def _check_entries(
    node: "BookieNode", bookie: Bookie, ledger_id: int, entries: list[int]
) -> None:
    served: dict[int, str] = {}
    at = entries[0]
    token = _token(node, ledger_id)
    while at <= entries[-1]:
        request = m.ReadRequest(node.bookie_id, ledger_id, at, entries[-1], 1 << 20, token=token)
        answer = await bookie.handle(request)
        assert isinstance(answer, m.ReadResponse)
        if not answer.results:
            break
        for result in answer.results:
            served[at] = result.status.name
            at += 1
    if bookie.failed.done() or node.stopping:
        return  # it is about to exit, and says nothing any more: the next start is asked
    for entry_id in entries:
        status = served.get(entry_id, answer.status.name)
        if not node.world.ghost.bookie(node.bookie_id).rotten:
            judge = invariants.an_acknowledged_add_survives_a_crash
            node.judge(judge, ledger_id, entry_id, status)
        elif status in ("NO_SUCH_ENTRY", "NO_SUCH_LEDGER"):
            ledger, now = node.world.ghost.ledgers[ledger_id], node.world.network.next_moment()
            node.judge(invariants.what_was_acknowledged_is_never_denied, ledger, entry_id, now)


def _token(node: "BookieNode", ledger_id: int) -> bytes:
    """What reads the ledger; every password in a run is the same."""
    has_password = node.world.ghost.ledgers[ledger_id].record.verifiers is not None
    return derive(PASSWORD).read if has_password else b""


def _exists(node: "BookieNode", ledger_id: int) -> bool:
    """A ledger that is deleted may be forgotten."""
    return node.world.store.peek(paths.ledger(ledger_id)) is not None
