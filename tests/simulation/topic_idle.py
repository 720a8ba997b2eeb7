"""A driver that polls: topics followed in memory, as latestOffset answers an idle query (T16).

Always true: what it is told is compared with the log of the store at that moment; how old it may be
depends on what its session went through lately, which the store's own session says.
"""

import asyncio
from bisect import bisect_right

from spark_ledger.errors import LedgerError
from spark_ledger.metadata.store import SessionState, StoreError
from spark_ledger.topic.log.topic_log import fold_agreeing, states_agree
from spark_ledger.topic.read.follower import (
    READ_GAP_S,
    REREAD_S,
    UNCONFIRMED_REREADS,
    TopicFollower,
)
from tests.simulation import invariants
from tests.simulation.topic_ghost import LogGhost
from tests.simulation.topic_work import TopicWork
from tests.simulation.world import Client

Followed = list[tuple[LogGhost, TopicFollower]]

POLL_S = 0.5
SLACK_S = 1.0
"""For the calls that a look takes, where the store is not slow."""
BEHIND = ("stall", "suspension", "expiry", "pause", "clock jump", "slow store", "unknown outcomes")
"""Classes after which a look may take as long as it likes, and the error alone is certain."""
WITHOUT_BODIES = (
    *("kill", "power", "power everywhere", "power cut while writing", "restart", "blank"),
    *("hang", "loss", "partition", "clog", "lost directory", "directory away"),
)
"""Classes in which the bookies may be away that have the body of a commit that was heard of: until
one is back the state before it is the newest that can be read."""


async def follow_often(work: TopicWork, client: Client) -> None:
    """Follow the topics there are, for a while; then those that there are then."""
    topics, world = work.client(client), work.world
    end = world.loop.now + work.plan.chaos_s
    while world.loop.now < end:
        await asyncio.sleep(client.rng.uniform(0.2, 2))
        logs = [log for log in work.ghost.logs.values() if not log.state.deleted]
        until = min(end, world.loop.now + client.rng.choice((5.0, 60.0)))
        try:
            followed = [(log, await topics.follow(log.topic_id)) for log in logs]
            while followed and world.loop.now < until:
                await _poll(work, client, followed)
                await asyncio.sleep(POLL_S)
        except (LedgerError, StoreError) as error:
            work.met(client, "follow", error)


async def _poll(work: TopicWork, client: Client, followed: Followed) -> None:
    """As a driver does: what is known of each topic, or, if that does not agree, all anew."""
    world = work.world
    states = [follower.state() for _, follower in followed]
    for (log, follower), state in zip(followed, states, strict=True):
        bound_s = _age_s_max(work, client, heard=follower.is_behind)
        ends = state.end_offsets()
        before = work.ghost.ends_told.setdefault((client.name, log.topic_id), {})
        invariants.an_end_never_goes_back(world.ghost, log.topic_id, before, ends)
        before |= ends
        due = bisect_right(log.logged_s, world.loop.now - bound_s)
        invariants.an_idle_poll_is_not_old(world.ghost, log.topic_id, state.next, due, bound_s)
    if not states_agree(states):
        world.ghost.meet("states of a poll did not agree")
        states = await fold_agreeing([follower.log for _, follower in followed])
    work.judge_states(states)


def _age_s_max(work: TopicWork, client: Client, *, heard: bool) -> float:
    """How old a state may be that is given out and not refused; `heard`: of a commit that is not in
    it."""
    lag_s = 5.0 if "lagging store" in work.plan.faults else 0.0
    connected = client.session.session_state is SessionState.CONNECTED
    late = (*BEHIND, *WITHOUT_BODIES) if heard else BEHIND
    if connected and not any(name in late for name in work.plan.faults):
        return REREAD_S + READ_GAP_S + lag_s + SLACK_S
    return UNCONFIRMED_REREADS * REREAD_S + lag_s + SLACK_S
