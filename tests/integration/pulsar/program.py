"""One program for Pulsar's Python client, of short steps: what it sees is a transcript.

Run against Pulsar standalone it says what a client is entitled to; run against our broker it has
to say the same. Every step has topics of its own and gives what it saw under names: values,
counts, comparisons of ids and the client's own names of errors, never an id, an address or a time.
A step that a broker breaks off ends with the name of that error.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pulsar

from tests.integration.pulsar import by_key, operating, reading, sharing, writing
from tests.integration.pulsar.case import Case, Seen, World

STEPS: tuple[Callable[[Case], None], ...] = (
    writing.a_lone_message_has_all_that_was_said,
    writing.a_batch_is_one_entry_with_an_index_for_each_message,
    writing.null_and_empty_values_are_told_apart_from_others,
    writing.a_message_with_every_codec_is_the_same,
    writing.an_ordering_key_and_empty_properties_come_through,
    writing.a_message_that_is_too_large_is_refused_and_the_next_one_taken,
    writing.text_with_a_string_schema_comes_through,
    writing.a_producers_name_is_taken_while_it_is_connected,
    writing.an_exclusive_producer_is_alone,
    writing.an_exclusive_producer_does_not_come_beside_shared_ones,
    writing.a_fencing_producer_sends_the_others_away,
    writing.sequence_ids_count_from_what_the_producer_says,
    writing.what_is_sent_again_is_stored_once_with_deduplication,
    writing.a_terminated_topic_takes_no_more_and_is_read_to_its_end,
    reading.a_second_exclusive_consumer_is_refused,
    reading.a_subscription_in_use_has_one_type,
    reading.a_subscription_begins_at_the_end_or_where_it_is_told,
    reading.a_durable_subscription_goes_on_after_what_was_acknowledged,
    reading.a_cumulative_ack_covers_all_before_it,
    reading.what_is_nacked_comes_again_and_says_so,
    reading.what_is_asked_for_again_comes_again,
    reading.of_failover_consumers_the_first_by_name_is_active,
    reading.an_unsubscribed_name_begins_anew,
    reading.a_name_that_others_use_is_not_unsubscribed,
    reading.a_consumer_seeks_by_id_and_to_both_ends,
    reading.a_consumer_seeks_by_time,
    reading.a_seek_beyond_the_end_is_taken,
    reading.a_reader_begins_where_it_is_told,
    reading.a_reader_begins_within_a_batch,
    reading.the_last_id_is_that_of_the_last_message,
    reading.a_table_view_has_the_last_value_of_each_key,
    reading.a_partitioned_topic_keeps_the_order_of_keys,
    reading.a_partition_is_used_by_its_own_name,
    reading.several_topics_and_a_pattern_are_consumed_together,
    reading.a_topic_that_nobody_may_make_is_not_found,
    reading.wrong_names_are_refused,
    writing.a_chunked_message_is_taken,
    writing.rows_with_a_schema_are_taken,
    writing.a_topic_that_is_not_kept_is_made,
    sharing.shared_consumers_have_each_message_once,
    sharing.a_shared_consumer_without_room_gets_no_more,
    sharing.a_shared_consumer_without_a_queue_takes_one_at_a_time,
    sharing.a_batch_goes_to_one_shared_consumer,
    sharing.a_shared_consumer_that_joins_later_gets_some_too,
    sharing.a_shared_subscription_begins_where_it_is_told,
    sharing.a_partitioned_topic_is_shared,
    sharing.several_topics_are_shared,
    sharing.a_chunked_message_goes_whole_to_one_shared_consumer,
    sharing.a_shared_subscription_in_use_has_one_type,
    sharing.a_subscription_changes_its_type_while_it_is_unused,
    sharing.what_is_acknowledged_one_by_one_does_not_come_again,
    sharing.a_shared_consumer_does_not_acknowledge_cumulatively,
    sharing.a_batch_acknowledged_in_part_comes_again_whole,
    sharing.of_a_batch_acknowledged_by_index_the_rest_comes_again,
    sharing.what_a_shared_consumer_nacks_is_counted,
    sharing.only_what_is_nacked_comes_again,
    sharing.what_is_nacked_may_go_to_another_consumer,
    sharing.a_nack_within_a_batch,
    sharing.all_that_a_shared_consumer_has_is_asked_for_again,
    sharing.what_a_consumer_that_leaves_had_goes_to_the_others,
    sharing.the_count_of_a_message_begins_anew_after_the_last_consumer,
    sharing.a_message_that_is_nacked_too_often_is_a_dead_letter,
    sharing.dead_letters_have_a_topic_of_their_own,
    sharing.a_delayed_message_comes_when_it_is_due,
    sharing.delayed_messages_come_in_the_order_in_which_they_are_due,
    sharing.a_message_that_was_due_long_ago_comes_at_once,
    sharing.only_shared_subscriptions_delay,
    sharing.a_shared_subscription_is_put_to_an_id,
    sharing.a_seek_moves_all_shared_consumers,
    sharing.a_shared_subscription_is_put_to_a_time,
    sharing.a_seek_within_a_batch_goes_by_its_index,
    sharing.a_shared_subscription_is_unsubscribed_by_its_last_consumer,
    sharing.the_last_id_of_a_shared_subscription,
    by_key.a_key_is_at_one_consumer_in_order,
    by_key.an_ordering_key_counts_before_the_key,
    by_key.messages_without_a_key_are_spread,
    by_key.batches_of_one_key_go_to_its_consumer,
    by_key.a_range_of_slots_has_the_same_keys_as_in_pulsar,
    by_key.slots_in_no_range_wait_and_do_not_block_others,
    by_key.several_ranges_of_one_consumer,
    by_key.ranges_do_not_overlap,
    by_key.a_key_shared_subscription_in_use_has_one_mode,
    by_key.a_key_moves_to_another_consumer_once_nothing_of_it_is_unacknowledged,
    by_key.the_keys_of_a_consumer_that_leaves_go_on_in_order,
    by_key.what_a_key_shared_consumer_nacks_comes_again,
    by_key.a_full_consumer_holds_back_its_own_keys_only,
    by_key.a_key_shared_subscription_begins_at_the_earliest_message,
    operating.messages_are_skipped_except_those_that_are_acknowledged,
    operating.all_messages_are_skipped,
    operating.messages_expire_by_their_age,
    operating.a_subscription_is_reset_to_a_time,
    operating.a_subscription_is_reset_to_an_id,
    operating.connected_consumers_go_on_where_a_subscription_was_reset_to,
    operating.a_subscription_is_made_before_it_has_consumers,
    operating.a_subscription_is_deleted_with_force_only_while_it_is_used,
    operating.the_next_messages_of_a_subscription_are_shown,
    operating.a_backlog_counts_what_is_not_acknowledged,
    operating.clients_go_on_after_an_unload,
    operating.an_active_consumer_goes_on_after_an_unload,
    operating.a_topic_is_deleted_with_force_only_while_it_is_used,
    operating.the_partitions_of_a_topic_only_grow,
    operating.the_rest_of_a_batch_comes_after_an_unload,
)


@contextmanager
def _connected(world: World):
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(world.url, logger=quiet, operation_timeout_seconds=30)
    try:
        yield client
    finally:
        with suppress(pulsar.AlreadyClosed):  # it tells of a fenced producer, then forgets it
            client.close()


def run(world: World, steps: Sequence[Callable[[Case], None]] = STEPS) -> dict[str, Seen]:
    """What each step saw."""
    transcript = {}
    for step in steps:
        with _connected(world) as client, _connected(world) as other:
            case = Case(world, client, other)
            try:
                step(case)
            except pulsar.PulsarException as error:
                case.seen["ended by"] = type(error).__name__
            transcript[step.__name__] = plain(case.seen)
    return transcript


def plain(seen: Any) -> Any:
    """As JSON would read it back."""
    if isinstance(seen, dict):
        return {key: plain(value) for key, value in seen.items()}
    return [plain(one) for one in seen] if isinstance(seen, list | tuple) else seen
