"""For each invariant of brokers what keeps it and what breaks it (test_invariants.py)."""

from typing import Any

from tests.simulation import invariants as I

OF_BROKERS: list[tuple[Any, ...]] = [
    (
        *("B1", I.a_message_is_stored_as_often_as_it_was_sent),
        lambda g, x: (b"ann.0.0:0:1", 1, 1),
        lambda g, x: (b"ann.0.0:0:1", 2, 1),
    ),
    (
        *("B2", I.messages_are_in_the_order_of_their_producer),
        lambda g, x: ("ann.0", (0, 1), (0, 2)),
        lambda g, x: ("ann.0", (0, 1), (0, 3)),
    ),
    (
        *("B2", I.messages_are_in_the_order_of_their_producer),
        lambda g, x: ("ann.0", (0, 1), (2, 0)),
        lambda g, x: ("ann.0", (2, 0), (0, 2)),
    ),
    (
        *("B3", I.nothing_is_told_that_is_not_confirmed),
        lambda g, x: ("a reader", 0, 5, 5),
        lambda g, x: ("a reader", 0, 6, 5),
    ),
    (
        *("B4", I.receipts_come_in_the_order_of_batches),
        lambda g, x: ("ann", 3, 3),
        lambda g, x: ("ann", 4, 3),
    ),
    (
        *("B4", I.receipts_come_in_the_order_of_batches),
        lambda g, x: ("ann", 3, 3),
        lambda g, x: ("ann", 3, None),
    ),
    (
        *("B5", I.a_seal_says_what_its_entries_are),
        lambda g, x: (1, [2, 1], [2, 1]),
        lambda g, x: (1, [2, 1], [1, 2]),
    ),
    (
        *("B6", I.what_has_a_receipt_is_there),
        lambda g, x: (b"ann.0.0:0:1", True),
        lambda g, x: (b"ann.0.0:0:1", False),
    ),
    (
        *("B7", I.a_consumer_passes_over_nothing),
        lambda g, x: ("a consumer", 0, []),
        lambda g, x: ("a consumer", 0, [3]),
    ),
    (
        *("B8", I.a_durable_position_never_goes_back),
        lambda g, x: ("s", 0, 5, 5),
        lambda g, x: ("s", 0, 4, 5),
    ),
    (
        *("B8", I.a_durable_position_never_goes_back),
        lambda g, x: ("s", 0, 5, 5),
        lambda g, x: ("s", 0, None, 5),
    ),
    (
        *("B9", I.a_producer_that_comes_back_hears_how_far_it_came),
        lambda g, x: ("ann", 5, 5),
        lambda g, x: ("ann", 4, 5),
    ),
    (
        *("B10", I.all_who_use_brokers_come_to_the_end),
        lambda g, x: ([],),
        lambda g, x: (["ann"],),
    ),
    (
        *("B11", I.what_is_decided_waits_no_more),
        lambda g, x: ({"broker.1": 0},),
        lambda g, x: ({"broker.1": 7},),
    ),
    (
        *("B12", I.what_was_sought_comes_first),
        lambda g, x: ("a consumer", (3, 3), 2, 4),
        lambda g, x: ("a consumer", (3, 3), 4, 5),
    ),
    (
        *("B12", I.what_was_sought_comes_first),
        lambda g, x: ("a consumer", (3, 9), 5, 7),
        lambda g, x: ("a consumer", (3, 9), 0, 3),
    ),
    (
        *("B13", I.a_deleted_subscription_is_gone),
        lambda g, x: ("s", False),
        lambda g, x: ("s", True),
    ),
    (
        *("B14", I.one_consumer_is_given_messages_at_a_time),
        lambda g, x: (("b1", "s", 0), "ann", "ann"),
        lambda g, x: (("b1", "s", 0), "ann", "bob"),
    ),
    (
        *("B15", I.who_is_fenced_stores_no_more),
        lambda g, x: (b"ann.0.0:0:1", 2, 2),
        lambda g, x: (b"ann.0.0:0:1", 1, 2),
    ),
    (
        *("B15", I.who_is_alone_is_not_fenced),
        lambda g, x: ("ann", ["bob"]),
        lambda g, x: ("ann", []),
    ),
    (
        *("B16", I.a_read_has_what_had_a_receipt_before),
        lambda g, x: (0, 5, 5),
        lambda g, x: (0, 4, 5),
    ),
    (
        *("B17", I.a_message_in_chunks_is_whole),
        lambda g, x: ("a consumer", [("u", 0, 2), ("u", 1, 2)], [("u", 0, 2), ("u", 1, 2)]),
        lambda g, x: ("a consumer", [("v", 0, 2), ("u", 1, 2)], [("u", 0, 2), ("u", 1, 2)]),
    ),
    (
        *("B17", I.chunks_of_a_message_have_one_id),
        lambda g, x: ("ann", 5, 5),
        lambda g, x: ("ann", 4, 5),
    ),
    (
        *("B18", I.the_last_message_is_the_last_with_a_row),
        lambda g, x: ("a reader", 4, True, 4, 6),
        lambda g, x: ("a reader", 5, False, 4, 6),
    ),
    (
        *("B18", I.the_last_message_is_the_last_with_a_row),
        lambda g, x: ("a reader", -1, False, -1, 0),
        lambda g, x: ("a reader", 3, True, 4, 6),
    ),
    (
        *("B19", I.a_row_is_pending_at_one_consumer),
        lambda g, x: ("shared", 0, []),
        lambda g, x: ("shared", 0, [7]),
    ),
    (
        *("B20", I.a_count_is_of_requests),
        lambda g, x: ("a consumer", 7, 2, 2),
        lambda g, x: ("a consumer", 7, 3, 2),
    ),
    (
        *("B22", I.what_has_a_receipt_is_not_sent_again),
        lambda g, x: ("a consumer", 0, []),
        lambda g, x: ("a consumer", 0, [7]),
    ),
    (
        *("B21", I.no_more_is_sent_than_asked_for),
        lambda g, x: ("a consumer", 7, 1),
        lambda g, x: ("a consumer", 7, 0),
    ),
    (
        *("B23", I.a_slot_is_at_one_consumer),
        lambda g, x: ("by key", 0, []),
        lambda g, x: ("by key", 0, [7]),
    ),
    (
        *("B24", I.a_key_is_in_order),
        lambda g, x: ("by key", 0, 6, 7),
        lambda g, x: ("by key", 0, 7, 6),
    ),
    (
        *("B25", I.no_delayed_message_is_early),
        lambda g, x: ("a consumer", 7, 1_000, 1_000),
        lambda g, x: ("a consumer", 7, 1_000, 999),
    ),
]
