"""Topics: T1 to T12, T14 to T16, and of the protocol's list 31 and 32."""

from collections.abc import Collection
from typing import Any

from tests.kit.history import History, HistoryBroken
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants.judge import Violation, invariant, require


@invariant("T1")
def a_commit_that_returned_is_in_the_log_once(
    ghost: Ghost, key: tuple[str, int, str], times: int
) -> None:
    """A commit that returned success is in every later fold, once."""
    require(times == 1, "T1", f"{key} returned success and is {times} times in the log")


@invariant("T1")
def what_was_promised_of_topics_is_read(ghost: Ghost, history: History) -> None:
    """Every row of a committed task attempt is in the final fold, once, in the order of its task.
    The violation is of the invariant that the history breaks."""
    try:
        history.check()
    except HistoryBroken as broken:
        raise Violation(_BROKEN[broken.kind], str(broken)) from broken


_BROKEN = {
    "lost": "T1",
    "doubled": "T1",
    "unknown": "T5",
    "moved": "T3",
    "gap": "T3",
    "order": "T3",
}


@invariant("T1")
def commits_follow_one_another(ghost: Ghost, topic_id: str, wanted: int, number: int) -> None:
    """Commits of a topic are numbered from 0, each number once, also after their nodes are gone."""
    require(number == wanted, "T1", f"commit {number} of topic {topic_id} comes after {wanted - 1}")


@invariant("T1")
def a_fold_is_that_of_all_commits_ever(ghost: Ghost, commits: int, found: Any, wanted: Any) -> None:
    """fold(checkpoint + tail) = fold(all actions ever): where each partition starts and ends, how
    many rows it keeps, and when it was last rearranged."""
    require(found == wanted, "T1", f"after {commits} commits {found} is folded, not {wanted}")


@invariant("T1")
def an_overwrite_takes_what_it_knew(
    ghost: Ghost, topic_id: str, number: int, since: list[int]
) -> None:
    """An overwrite takes away rows that were there when its run began, and that query's own, but
    none that others added since (hazard 9)."""
    what = f"commit {number} of {topic_id} overwrites what came after its run began"
    require(not since, "T1", f"{what}: commits {since[:5]}")


@invariant("T1")
def a_checkpoint_only_rises(
    ghost: Ghost, topic_id: str, was: tuple[int, int], now: tuple[int, int]
) -> None:
    """A checkpoint's `next` and `trimmed` only rise (hazard 6)."""
    rises = now != was and now[0] >= was[0] and now[1] >= was[1]
    require(rises, "T1", f"the checkpoint of {topic_id} went from {was} to {now}")


@invariant("T1")
def a_commit_goes_when_two_checkpoints_have_it(ghost: Ghost, number: int, previous: int) -> None:
    """A commit's node is deleted only when the checkpoint before the newest has it, too."""
    require(number < previous, "T1", f"commit {number} is gone, two checkpoints go to {previous}")


@invariant("T2")
def success_is_of_ones_own_or_earlier_rows(
    ghost: Ghost, run: str, author: str, later: bool
) -> None:
    """A success or no-op of a run means that its own rows or those of an earlier run are there."""
    require(not later, "T2", f"{run} was told success of the rows of {author}, which began later")


@invariant("T2")
def what_ended_as_not_committed_is_not(ghost: Ghost, run: str, times: int) -> None:
    """A commit that ends with errors.Unavailable was not made: its rows may be written again, also
    under another app id."""
    require(not times, "T2", f"{run} heard that nothing was committed, and its commit is there")


@invariant("T2")
def a_version_contributes_rows_at_most_once(
    ghost: Ghost, key: tuple[str, int, str], times: int
) -> None:
    """Each (transaction key, version) contributes rows at most once."""
    require(times <= 1, "T2", f"{key} contributes rows {times} times")


@invariant("T3")
def an_offset_is_one_row_for_ever(
    ghost: Ghost, known: dict[Any, Any], place: tuple[str, int, int], row: Any
) -> None:
    """Offset -> row is a function for ever, per topic id."""
    first = known.setdefault(place, row)
    require(first == row, "T3", f"{place} read as {row!r}, was {first!r}")


@invariant("T3")
def offsets_are_dense(
    ghost: Ghost,
    partition: int,
    offsets: list[int],
    start: int,
    end: int,
    rowless: Collection[int] = (),
) -> None:
    """Offsets of a partition are start .. end-1, each once, in order, but for those `rowless`,
    which chunks of messages took."""
    require(
        offsets == [at for at in range(start, end) if at not in rowless],
        "T3",
        f"partition {partition} is {start}..{end} and reads as {len(offsets)} offsets"
        f" {offsets[-5:]}; without a row are {[*rowless][:20]}; {offsets}",
    )


@invariant("T3")
def a_row_is_where_its_commit_put_it(ghost: Ghost, place: Any, attempt: str, wanted: str) -> None:
    """Through checkpoint, trim and merge a row keeps the offset that its commit gave it."""
    require(attempt == wanted, "T3", f"{place} read as a row of {attempt}, committed by {wanted}")


@invariant("T4")
def what_was_dropped_stays_for_the_delete_delay(
    ghost: Ghost, ledger_id: int, since_ms: int, delay_ms: int
) -> None:
    """A ledger to which nothing refers any more is deleted after the delete delay (hazard 34)."""
    what = f"ledger {ledger_id} was deleted {since_ms} ms after it was dropped"
    require(since_ms >= delay_ms, "T4", f"{what}, the delay is {delay_ms} ms")


@invariant("T4")
def what_a_commit_names_is_there(ghost: Ghost, ledger_id: int, deleted: bool) -> None:
    """No ledger reachable from a fold is ever deleted, before or after its commit: one with rows
    that are kept, a body, a chunk, a root."""
    require(not deleted, "T4", f"ledger {ledger_id} is in a commit and was deleted")


@invariant("T4")
def what_a_commit_takes_away_it_names(ghost: Ghost, topic_id: str, unnamed: list[int]) -> None:
    """A ledger of which a commit takes the last rows is named by it as dropped (hazard 9)."""
    require(not unnamed, "T4", f"ledgers {unnamed} lost all rows in {topic_id}, and none says so")


@invariant("T5")
def every_row_read_was_committed(ghost: Ghost, committed: bool, row: Any) -> None:
    """No reader returns a row that is in no commit: never one of a failed, aborted or condemned
    attempt."""
    require(committed, "T5", f"row {row!r} was read and is in no commit")


@invariant("T6")
def what_is_committed_was_acked(ghost: Ghost, ledger: LedgerGhost, last_entry: int) -> None:
    """At the commit every entry in every range was acked to its writer; a later (or earlier)
    CLOSED.last_entry >= the range's end."""
    what = f"ledger {ledger.ledger_id} entry {last_entry} was committed"
    require(last_entry <= ledger.acked, "T6", f"{what}, acked is {ledger.acked}")
    end = ledger.record.last_entry
    require(end is None or last_entry <= end, "T6", f"{what}, CLOSED at {end}")


@invariant("T7")
def an_acked_row_is_in_the_log(ghost: Ghost, ledger_id: int, rows: int, named: bool) -> None:
    """Rows are acked to a producer only in a ledger that the log names as live, or named once."""
    require(named, "T7", f"{rows} rows were acked in ledger {ledger_id}, which no log names")


@invariant("T7")
def acked_rows_of_producers_are_there_once(ghost: Ghost, name: str, row: int, times: int) -> None:
    """Every acked row of a producer is in exactly one segment or one live ledger of the log."""
    require(times == 1, "T7", f"row {row} of {name} was acked and is there {times} times")


@invariant("31")
def a_chain_is_read_in_the_order_of_its_acks(
    ghost: Ghost, partition: int, before: tuple[int, int], place: tuple[int, int]
) -> None:
    """The rows of a chain of live ledgers lie in the order of (ledger in the log, row in it), which
    is the order of their acks: one owner's in its order, all of them before the next owner's."""
    what = f"partition {partition}: (ledger, row) {place} comes after {before}"
    require(place > before, "31", what)


@invariant("31")
def one_owner_at_a_time_is_acked(ghost: Ghost, ledger_id: int, later: bool) -> None:
    """What an owner sends once the log names another ledger after its own is never acked."""
    what = f"a row was acked in ledger {ledger_id} that was sent after the log named the next"
    require(not later, "31", what)


@invariant("32")
def a_source_reads_each_position_once(
    ghost: Ghost, partition: int, span: tuple[int, int], offsets: list[int], kept: int
) -> None:
    """A batch that begins at saved positions gives each offset of its `span` once, in order, after
    any earlier reader; offsets that it leaves out were trimmed: they are below `kept`."""
    start, end = span
    first = min(offsets, default=end)
    whole = offsets == list(range(first, end)) and start <= first <= max(start, min(kept, end))
    what = f"partition {partition}: a batch of {start}..{end}, rows kept from {kept} on"
    require(whole, "32", f"{what}, gave {len(offsets)} offsets {offsets[:3]}..{offsets[-3:]}")


@invariant("32")
def a_source_never_goes_back(ghost: Ghost, partition: int, saved: int, end: int) -> None:
    """No reader sees a partition's end below the position that was saved."""
    require(end >= saved, "32", f"partition {partition} ends at {end}, saved was {saved}")


@invariant("T8")
def what_is_committed_is_readable_at_once(ghost: Ghost, problem: str) -> None:
    """Committed ranges are fully readable at once by a fresh reader while at most Qa - 1 copies
    are lost, without waiting for another add."""
    require(not problem, "T8", f"a fresh reader cannot read what is committed: {problem}")


@invariant("T9")
def topics_are_seen_together(ghost: Ghost, commit_id: str, seen: dict[str, bool]) -> None:
    """A commit over several topics is seen by a read of them in all or in none."""
    require(len(set(seen.values())) <= 1, "T9", f"commit {commit_id} is seen as {seen}")


@invariant("T10")
def nothing_held_is_trimmed(
    ghost: Ghost, name: str, partition: int, offset: int, ceiling: int | None
) -> None:
    """The trim point is at or below every subscription's position."""
    free = ceiling is None or offset <= ceiling
    what = f"partition {partition} was trimmed to {offset}, subscription {name} is at"
    require(free, "T10", f"{what} {ceiling} at most")


@invariant("T10")
def what_was_held_lately_is_not_trimmed(
    ghost: Ghost, name: str, partition: int, offset: int, lowest: int | None
) -> None:
    """The trim point is at or below every position that a subscription had in the grace period
    before it (hazard 38): a query that goes on from an older checkpoint finds its rows."""
    free = lowest is None or offset <= lowest
    what = f"partition {partition} was trimmed to {offset}, subscription {name} was at"
    require(free, "T10", f"{what} {lowest} at most in the grace period")


@invariant("T10")
def no_held_row_is_replaced(
    ghost: Ghost, name: str, partition: int, end: int, lowest: int | None
) -> None:
    """Rows that an overwrite takes away end at or below every position that a subscription had in
    the grace period before it, unless the user forced it."""
    free = lowest is None or end <= lowest
    what = f"rows of partition {partition} up to {end} were replaced, subscription {name} was at"
    require(free, "T10", f"{what} {lowest} at most in the grace period")


@invariant("T10")
def retention_goes_by_the_stores_time(
    ghost: Ghost, partition: int, offset: int, age_ms: int, retention_ms: int
) -> None:
    """Rows that retention lets go were committed that long ago, by the store's clock."""
    what = f"row {offset - 1} of partition {partition} went {age_ms} ms after its commit"
    require(age_ms >= retention_ms, "T10", f"{what}, retention is {retention_ms} ms")


@invariant("T11")
def nothing_is_committed_to_a_deleted_topic(ghost: Ghost, topic_id: str, deleted: bool) -> None:
    """After a topic was deleted it takes no commit (hazard 36)."""
    require(not deleted, "T11", f"a commit came to topic {topic_id}, which was deleted")


@invariant("T11")
def rows_come_to_the_topic_they_were_written_for(ghost: Ghost, topic_id: str, are: bool) -> None:
    """Nothing that tasks wrote for one topic id is accepted under another."""
    require(are, "T11", f"rows that were written for another topic came to {topic_id}")


@invariant("T11")
def nothing_of_one_topic_is_in_another(
    ghost: Ghost, place: Any, written_for: str, topic_id: str
) -> None:
    """Nothing of topic id X is ever returned under id Y."""
    require(written_for == topic_id, "T11", f"{place} has a row of topic '{written_for}'")


@invariant("T11")
def nothing_is_acked_once_a_topic_was_deleted(ghost: Ghost, topic_id: str, late: bool) -> None:
    """No add that was sent after a client learned that the topic is deleted is ever acked."""
    require(not late, "T11", f"an add of topic {topic_id} was acked, which was deleted before")


@invariant("T12")
def a_cursor_is_found_where_it_was_confirmed(
    ghost: Ghost, name: str, partition: int, found: int | None, confirmed: int
) -> None:
    """A recovered cursor is at or after the last confirmed write."""
    there = found is not None and found >= confirmed
    what = f"subscription {name}, partition {partition}, was confirmed at {confirmed}"
    require(there, "T12", f"{what} and found at {found}")


@invariant("T12")
def a_cursor_is_found_where_it_was_put(
    ghost: Ghost, name: str, partition: int, found: int, sought: int
) -> None:
    """The first owner of the subscription after a seek finds it no further than the seek put it:
    the rows from there on come again."""
    what = f"subscription {name}, partition {partition}, was put to {sought} and found at {found}"
    require(found <= sought, "T12", what)


@invariant("T12")
def only_the_current_epoch_writes(ghost: Ghost, name: str, epoch: int, current: int) -> None:
    """What the owner of an earlier epoch writes after it was taken over is never confirmed."""
    what = f"subscription {name}: epoch {epoch} confirmed what it was told in epoch {current}"
    require(epoch >= current, "T12", what)


@invariant("T15")
def a_commit_writes_each_topic_twice(
    ghost: Ghost, topics: int, writes: int, schemas: int = 0
) -> None:
    """ZooKeeper writes of a commit: head and log node of each topic, the transaction record and at
    most the intent, and the head of each schema that it changes (`schemas`): they do not grow with
    partitions or segments."""
    most = 2 * topics + 2 + schemas
    require(writes <= most, "T15", f"a commit to {topics} topics made {writes} writes")


@invariant("T14")
def every_committer_ends(ghost: Ghost, what: str, done: bool) -> None:
    """Liveness: every creation and every batch is committed within a bounded number of runs."""
    require(done, "T14", f"{what} was not committed")


@invariant("T14")
def cleaning_ends(ghost: Ghost, left: str, done: bool) -> None:
    """Liveness: when all writers are gone, passes of the janitor come to do nothing more."""
    require(done, "T14", f"the janitor does not come to an end: {left}")


@invariant("T14")
def no_task_ledger_stays_open(ghost: Ghost, ledger_id: int, is_open: bool) -> None:
    """What was made for a topic is CLOSED, once its writer is gone and the janitor was there."""
    require(not is_open, "T14", f"ledger {ledger_id} of a topic is left open")


@invariant("T14")
def nothing_unreferred_is_left(ghost: Ghost, ledger_id: int, kept: bool) -> None:
    """A ledger that no topic names, nor did within its delete delay, is gone after the janitor."""
    require(kept, "T14", f"ledger {ledger_id} is left, and no topic refers to it")


@invariant("T14")
def what_is_gone_is_forgotten(ghost: Ghost, left: list[str]) -> None:
    """A process that lives on keeps nothing in memory of topics and consumers that are gone."""
    require(not left, "T14", f"{len(left)} are in memory and gone: {left[:3]}")


@invariant("T14")
def a_log_is_its_tail(
    ghost: Ghost, topic_id: str, numbers: list[int], span: tuple[int, int], nodes_max: int
) -> None:
    """After a checkpoint the log has the commits from the one before it on, no others, and no
    more than it may have."""
    whole = numbers == list(range(*span)) and len(numbers) <= nodes_max
    what = f"the log of {topic_id} has commits {numbers[:3]}..{numbers[-3:]}, {len(numbers)}"
    require(whole, "T14", f"{what}, and should have {span[0]}..{span[1]}, at most {nodes_max}")


@invariant("T14")
def watches_come_back_to_the_baseline(ghost: Ghost, left: list[str]) -> None:
    """A client that has closed its followers watches no topic, once the watched nodes have
    changed."""
    require(not left, "T14", f"watches are left: {', '.join(left[:5])}")


@invariant("T15")
def a_commits_nodes_are_small(ghost: Ghost, topic_id: str, size: int, bytes_max: int) -> None:
    """What is above a bound goes to a ledger, and the commit's node has a pointer to it."""
    require(size <= bytes_max, "T15", f"a commit of {topic_id} has {size} bytes, not {bytes_max}")


@invariant("T15")
def a_write_is_small(ghost: Ghost, size: int, bytes_max: int) -> None:
    """A multi stays far below what the store takes at once."""
    require(size <= bytes_max, "T15", f"a write has {size} bytes, at most {bytes_max} are allowed")


@invariant("T15")
def a_session_has_few_ephemerals(ghost: Ghost, session: str, count: int, most: int) -> None:
    """One ephemeral a process, and one more while it moves: its end is one small transaction."""
    require(count <= most, "T15", f"session {session} has {count} ephemerals, at most {most}")


@invariant("T15")
def a_listing_is_small(ghost: Ghost, path: str, size: int, bytes_max: int) -> None:
    """The names of a node's children fit into one answer of the store."""
    require(size <= bytes_max, "T15", f"listing {path} takes {size} bytes, at most {bytes_max}")


@invariant("T5")
def an_end_told_was_committed(ghost: Ghost, told: int, committed: int) -> None:
    """No client gets an end beyond the committed rows."""
    require(told <= committed, "T5", f"an end {told} was told, of {committed} committed rows")


@invariant("T17")
def a_read_of_keys_leaves_none_out(ghost: Ghost, left_out: list[Any], strange: list[Any]) -> None:
    """A read of some keys gives every row that has one of them, and each row as it is (`left_out`,
    `strange`: partition and offset of those of which that is not so)."""
    require(not left_out, "T17", f"a read of some keys leaves out {left_out}, which have them")
    require(not strange, "T17", f"a read of some keys gives other rows at {strange}")


@invariant("T16")
def an_idle_poll_is_not_old(
    ghost: Ghost, topic_id: str, seen: int, due: int, bound_s: float
) -> None:
    """An idle poll in a connected session is never older than 10 s; without a connection it is an
    error within 30 s."""
    what = f"{due - seen} commits of topic {topic_id} were made more than {bound_s:.0f} s ago"
    require(seen >= due, "T16", f"{what} and an idle poll does not tell of them")


@invariant("T16")
def an_end_never_goes_back(
    ghost: Ghost, topic_id: str, before: dict[int, int], now: dict[int, int]
) -> None:
    """The end of a topic that a query gets is never below an end that it got before."""
    risen = all(now.get(p, -1) >= end for p, end in before.items())
    require(risen, "T16", f"topic {topic_id} ended at {before} and ends at {now}")
