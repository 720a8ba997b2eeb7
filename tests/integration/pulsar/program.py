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

from tests.integration.pulsar import reading, writing
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
    writing.a_shared_subscription_shares,
    writing.a_chunked_message_is_taken,
    writing.rows_with_a_schema_are_taken,
    writing.a_topic_that_is_not_kept_is_made,
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
