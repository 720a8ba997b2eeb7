"""For each invariant of topics what keeps it and what breaks it (test_invariants.py)."""

from typing import Any

from tests.kit.history import History
from tests.simulation import invariants
from tests.simulation.topic_ghost import Whereabouts

I = invariants  # noqa: E741


def was_at(time_s: float, offset: int) -> Whereabouts:
    """A subscription that was at 9 and went back to `offset` at that time, and on to 9 at second
    4."""
    found = Whereabouts()
    found.is_at(0.0, {0: 9})
    found.is_at(time_s, {0: offset})
    found.goes_to(4.0, {0: 9})
    return found


def _read_of_two(*rows: tuple[str, int]) -> History:
    """What was read of a topic with two committed rows of one task."""
    history = History()
    for row in range(2):
        history.promised("t", ("a1", row), lane="a1")
    history.read("t", [((0, offset), row) for offset, row in enumerate(rows)])
    return history


OF_TOPICS: list[tuple[Any, ...]] = [
    (
        *("T1", I.a_commit_that_returned_is_in_the_log_once),
        lambda g, x: (("q", 1), 1),
        lambda g, x: (("q", 1), 0),
    ),
    (
        *("T1", I.what_was_promised_of_topics_is_read),
        lambda g, x: (_read_of_two(("a1", 0), ("a1", 1)),),
        lambda g, x: (_read_of_two(("a1", 0)),),
    ),
    (
        *("T2", I.success_is_of_ones_own_or_earlier_rows),
        lambda g, x: ("run-1", "run-2", False),
        lambda g, x: ("run-1", "run-2", True),
    ),
    (
        *("T2", I.what_ended_as_not_committed_is_not),
        lambda g, x: ("run-1", 0),
        lambda g, x: ("run-1", 1),
    ),
    (
        *("T2", I.a_version_contributes_rows_at_most_once),
        lambda g, x: (("q", 1), 1),
        lambda g, x: (("q", 1), 2),
    ),
    (
        *("T3", I.an_offset_is_one_row_for_ever),
        lambda g, x: ({}, ("t", 0, 0), b"row"),
        lambda g, x: ({("t", 0, 0): b"other"}, ("t", 0, 0), b"row"),
    ),
    (
        *("T3", I.offsets_are_dense),
        lambda g, x: (0, [0, 1], 0, 2),
        lambda g, x: (0, [0, 2], 0, 3),
    ),
    (
        *("T4", I.what_a_commit_names_is_there),
        lambda g, x: (1, False),
        lambda g, x: (1, True),
    ),
    (
        *("T5", I.an_end_told_was_committed),
        lambda g, x: (3, 3),
        lambda g, x: (4, 3),
    ),
    (
        *("T17", I.a_read_of_keys_leaves_none_out),
        lambda g, x: ([], []),
        lambda g, x: ([(0, 1)], []),
    ),
    (
        *("T17", I.a_read_of_keys_leaves_none_out),
        lambda g, x: ([], []),
        lambda g, x: ([], [(0, 1)]),
    ),
    (
        *("T5", I.every_row_read_was_committed),
        lambda g, x: (True, b"row"),
        lambda g, x: (False, b"row"),
    ),
    (
        *("T6", I.what_is_committed_was_acked),
        lambda g, x: (x, 2),
        lambda g, x: (x, 3),
    ),
    (
        *("T1", I.commits_follow_one_another),
        lambda g, x: ("t", 3, 3),
        lambda g, x: ("t", 3, 2),
    ),
    (
        *("T1", I.a_fold_is_that_of_all_commits_ever),
        lambda g, x: (2, ((0, 5, 5, -1),), ((0, 5, 5, -1),)),
        lambda g, x: (2, ((0, 5, 5, -1),), ((0, 4, 4, -1),)),
    ),
    (
        *("T1", I.a_checkpoint_only_rises),
        lambda g, x: ("t", (4, 0), (6, 0)),
        lambda g, x: ("t", (4, 0), (3, 0)),
    ),
    (
        *("T1", I.a_checkpoint_only_rises),
        lambda g, x: ("t", (4, 0), (4, 2)),
        lambda g, x: ("t", (4, 2), (4, 1)),
    ),
    (
        *("T1", I.an_overwrite_takes_what_it_knew),
        lambda g, x: ("t", 5, []),
        lambda g, x: ("t", 5, [3]),
    ),
    (
        *("T4", I.what_a_commit_takes_away_it_names),
        lambda g, x: ("t", []),
        lambda g, x: ("t", [7]),
    ),
    (
        *("T1", I.a_commit_goes_when_two_checkpoints_have_it),
        lambda g, x: (1, 2),
        lambda g, x: (2, 2),
    ),
    (
        *("T3", I.a_row_is_where_its_commit_put_it),
        lambda g, x: (("t", 0, 1), "a1", "a1"),
        lambda g, x: (("t", 0, 1), "a1", "a2"),
    ),
    (
        *("T4", I.what_was_dropped_stays_for_the_delete_delay),
        lambda g, x: (1, 2_000, 2_000),
        lambda g, x: (1, 1_999, 2_000),
    ),
    (
        *("T9", I.topics_are_seen_together),
        lambda g, x: ("c", {"t": True, "u": True}),
        lambda g, x: ("c", {"t": True, "u": False}),
    ),
    (
        *("T10", I.nothing_held_is_trimmed),
        lambda g, x: ("s", 0, 5, 5),
        lambda g, x: ("s", 0, 6, 5),
    ),
    (
        *("T10", I.what_was_held_lately_is_not_trimmed),
        lambda g, x: ("s", 0, 5, was_at(0.0, 5).at_most(0, 3.0)),
        lambda g, x: ("s", 0, 5, was_at(2.0, 4).at_most(0, 3.0)),
    ),
    (
        *("T10", I.no_held_row_is_replaced),
        lambda g, x: ("s", 0, 5, 5),
        lambda g, x: ("s", 0, 6, 5),
    ),
    (
        *("T10", I.retention_goes_by_the_stores_time),
        lambda g, x: (0, 9, 4_000, 4_000),
        lambda g, x: (0, 9, 3_999, 4_000),
    ),
    (
        *("T12", I.a_cursor_is_found_where_it_was_confirmed),
        lambda g, x: ("s", 0, 5, 5),
        lambda g, x: ("s", 0, 4, 5),
    ),
    (
        *("T12", I.a_cursor_is_found_where_it_was_put),
        lambda g, x: ("s", 0, 5, 5),
        lambda g, x: ("s", 0, 6, 5),
    ),
    (
        *("T12", I.only_the_current_epoch_writes),
        lambda g, x: ("s", 2, 2),
        lambda g, x: ("s", 1, 2),
    ),
    (
        *("T15", I.a_commit_writes_each_topic_twice),
        lambda g, x: (2, 7, 1),
        lambda g, x: (2, 7),
    ),
    (
        *("T14", I.every_committer_ends),
        lambda g, x: ("a batch", True),
        lambda g, x: ("a batch", False),
    ),
    (
        *("T14", I.cleaning_ends),
        lambda g, x: ("nothing", True),
        lambda g, x: ("one intent is open", False),
    ),
    (
        *("T14", I.no_task_ledger_stays_open),
        lambda g, x: (1, False),
        lambda g, x: (1, True),
    ),
    (
        *("T14", I.nothing_unreferred_is_left),
        lambda g, x: (1, True),
        lambda g, x: (1, False),
    ),
    (
        *("T14", I.what_is_gone_is_forgotten),
        lambda g, x: ([],),
        lambda g, x: (["broker 1 follows t"],),
    ),
    (
        *("T14", I.a_log_is_its_tail),
        lambda g, x: ("t", [4, 5], (4, 6), 2),
        lambda g, x: ("t", [3, 4, 5], (4, 6), 9),
    ),
    (
        *("T14", I.a_log_is_its_tail),
        lambda g, x: ("t", [4, 5], (4, 6), 2),
        lambda g, x: ("t", [4, 5], (4, 6), 1),
    ),
    (
        *("T14", I.watches_come_back_to_the_baseline),
        lambda g, x: ([],),
        lambda g, x: (["driver.1: /topic-ids/t/head"],),
    ),
    (
        *("T15", I.a_commits_nodes_are_small),
        lambda g, x: ("t", 512, 512),
        lambda g, x: ("t", 513, 512),
    ),
    (
        *("T15", I.a_write_is_small),
        lambda g, x: (512, 512),
        lambda g, x: (513, 512),
    ),
    (
        *("T15", I.a_session_has_few_ephemerals),
        lambda g, x: ("driver", 2, 2),
        lambda g, x: ("driver", 3, 2),
    ),
    (
        *("T15", I.a_listing_is_small),
        lambda g, x: ("/intents", 512, 512),
        lambda g, x: ("/intents", 513, 512),
    ),
    (
        *("T7", I.an_acked_row_is_in_the_log),
        lambda g, x: (1, 5, True),
        lambda g, x: (1, 5, False),
    ),
    (
        *("T7", I.acked_rows_of_producers_are_there_once),
        lambda g, x: ("live1", 7, 1),
        lambda g, x: ("live1", 7, 2),
    ),
    (
        *("31", I.a_chain_is_read_in_the_order_of_its_acks),
        lambda g, x: (0, (1, 7), (2, 0)),
        lambda g, x: (0, (2, 0), (1, 8)),
    ),
    (
        *("31", I.a_chain_is_read_in_the_order_of_its_acks),
        lambda g, x: (0, (1, 7), (1, 8)),
        lambda g, x: (0, (1, 8), (1, 7)),
    ),
    (
        *("31", I.one_owner_at_a_time_is_acked),
        lambda g, x: (1, False),
        lambda g, x: (1, True),
    ),
    (
        *("32", I.a_source_reads_each_position_once),
        lambda g, x: (0, (3, 6), [3, 4, 5], 0),
        lambda g, x: (0, (3, 6), [4, 5], 0),
    ),
    (
        *("32", I.a_source_reads_each_position_once),
        lambda g, x: (0, (3, 6), [4, 5], 4),
        lambda g, x: (0, (3, 6), [5], 4),
    ),
    (
        *("32", I.a_source_reads_each_position_once),
        lambda g, x: (0, (3, 6), [], 9),
        lambda g, x: (0, (3, 6), [2, 3, 4, 5], 0),
    ),
    (
        *("32", I.a_source_reads_each_position_once),
        lambda g, x: (0, (3, 3), [], 0),
        lambda g, x: (0, (3, 6), [3, 3, 4, 5], 0),
    ),
    (
        *("32", I.a_source_never_goes_back),
        lambda g, x: (0, 3, 3),
        lambda g, x: (0, 3, 2),
    ),
    (
        *("T8", I.what_is_committed_is_readable_at_once),
        lambda g, x: ("",),
        lambda g, x: ("NoSuchEntry: entry 3 is beyond the last confirmed, 2",),
    ),
    (
        *("T11", I.nothing_is_committed_to_a_deleted_topic),
        lambda g, x: ("t", False),
        lambda g, x: ("t", True),
    ),
    (
        *("T11", I.rows_come_to_the_topic_they_were_written_for),
        lambda g, x: ("t", True),
        lambda g, x: ("t", False),
    ),
    (
        *("T11", I.nothing_of_one_topic_is_in_another),
        lambda g, x: (("t", 0, 1), "t", "t"),
        lambda g, x: (("t", 0, 1), "u", "t"),
    ),
    (
        *("T11", I.nothing_is_acked_once_a_topic_was_deleted),
        lambda g, x: ("t", False),
        lambda g, x: ("t", True),
    ),
    (
        *("T16", I.an_idle_poll_is_not_old),
        lambda g, x: ("t", 3, 3, 10.0),
        lambda g, x: ("t", 2, 3, 10.0),
    ),
    (
        *("T16", I.an_end_never_goes_back),
        lambda g, x: ("t", {0: 5}, {0: 5, 1: 0}),
        lambda g, x: ("t", {0: 5}, {0: 4}),
    ),
]
