"""The invariants, one function each, numbered as in docs/simulation.md."""

from tests.simulation.invariants.acks import (
    acks_come_in_order_and_never_after_a_failure,
    an_acked_entry_is_on_an_ack_quorum_of_the_published_ensemble,
    closed_last_entry_covers_every_ack,
    no_ack_after_delete,
)
from tests.simulation.invariants.bookies import (
    a_fence_survives_a_crash,
    a_fenced_negative_is_final,
    an_acknowledged_add_survives_a_crash,
    no_normal_add_begins_after_a_fence_reply,
    one_content_for_one_entry,
)
from tests.simulation.invariants.judge import (
    Violation,
    invariant,
    require,
    write_set,
)
from tests.simulation.invariants.reads import (
    a_confirmed_position_was_durable_when_it_was_said,
    a_confirmed_read_ends_in_bytes,
    all_opens_end_at_the_same_entry,
    an_acked_entry_is_readable_byte_for_byte,
    entries_come_whole_and_in_the_order_submitted,
    nothing_returned_lies_beyond_the_end,
)
from tests.simulation.invariants.records import (
    closed_never_changes,
    every_move_is_a_row_of_the_table,
    fragments_rise_within_what_is_confirmed,
    members_stand_still_in_recovery,
    recovery_stays_in_the_last_fragment,
    the_closed_tail_is_on_an_ack_quorum,
    the_length_is_the_sum_of_the_payloads,
)
from tests.simulation.invariants.topics import (
    a_commit_that_returned_is_in_the_log_once,
    a_version_contributes_rows_at_most_once,
    an_offset_is_one_row_for_ever,
    every_row_read_was_committed,
    offsets_are_dense,
)

__all__ = [
    "Violation",
    "a_commit_that_returned_is_in_the_log_once",
    "a_confirmed_position_was_durable_when_it_was_said",
    "a_confirmed_read_ends_in_bytes",
    "a_fence_survives_a_crash",
    "a_fenced_negative_is_final",
    "a_version_contributes_rows_at_most_once",
    "acks_come_in_order_and_never_after_a_failure",
    "all_opens_end_at_the_same_entry",
    "an_acked_entry_is_on_an_ack_quorum_of_the_published_ensemble",
    "an_acked_entry_is_readable_byte_for_byte",
    "an_acknowledged_add_survives_a_crash",
    "an_offset_is_one_row_for_ever",
    "closed_last_entry_covers_every_ack",
    "closed_never_changes",
    "entries_come_whole_and_in_the_order_submitted",
    "every_move_is_a_row_of_the_table",
    "every_row_read_was_committed",
    "fragments_rise_within_what_is_confirmed",
    "invariant",
    "require",
    "members_stand_still_in_recovery",
    "no_ack_after_delete",
    "no_normal_add_begins_after_a_fence_reply",
    "nothing_returned_lies_beyond_the_end",
    "offsets_are_dense",
    "one_content_for_one_entry",
    "recovery_stays_in_the_last_fragment",
    "the_closed_tail_is_on_an_ack_quorum",
    "the_length_is_the_sum_of_the_payloads",
    "write_set",
]
