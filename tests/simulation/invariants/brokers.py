"""Of brokers: receipts of producers, the messages stored for them, and those that consumers get."""

from typing import Any

from tests.simulation.ghost import Ghost
from tests.simulation.invariants.judge import invariant, require


@invariant("B1")
def a_message_is_stored_as_often_as_it_was_sent(
    ghost: Ghost, message: Any, times: int, allowed: int
) -> None:
    """Of a topic with deduplication once, whatever was sent again; else an owner stores it as often
    as it was sent to that owner at most."""
    require(times <= allowed, "B1", f"{message} is stored {times} times, may be {allowed} times")


@invariant("B2")
def messages_are_in_the_order_of_their_producer(
    ghost: Ghost, lane: Any, before: tuple[int, int], place: tuple[int, int]
) -> None:
    """Within a partition the first copies of a producer's messages are in its order, and none is
    left out: (life of the producer, message) is the next one, or the first of a later life."""
    life, number = place
    next_one = place == (before[0], before[1] + 1) or (life > before[0] and number == 0)
    require(next_one, "B2", f"of {lane} message {place} comes first after {before}")


@invariant("B3")
def nothing_is_told_that_is_not_confirmed(
    ghost: Ghost, who: str, partition: int, end: int, confirmed: int
) -> None:
    """No receipt, and no message to a consumer or reader, is beyond the commits and the acked
    entries of the live ledger that the log names (invariant 9 for brokers)."""
    what = f"{who}: partition {partition} is told up to {end}, confirmed is {confirmed}"
    require(end <= confirmed, "B3", what)


@invariant("B4")
def receipts_come_in_the_order_of_batches(
    ghost: Ghost, who: str, got: int, waiting: int | None
) -> None:
    """A receipt is that of the oldest batch that waits on its connection: a client takes it so."""
    require(got == waiting, "B4", f"{who} waits for receipt {waiting} and got that of {got}")


@invariant("B5")
def a_seal_says_what_its_entries_are(ghost: Ghost, ledger_id: int, told: Any, are: Any) -> None:
    """Rows of each entry, and how far each producer had come, are those of the ledger's entries
    (hazards 31, 32)."""
    require(told == are, "B5", f"the seal of ledger {ledger_id} says {told}, there is {are}")


@invariant("B6")
def what_has_a_receipt_is_there(ghost: Ghost, message: Any, there: bool) -> None:
    """At the end each message with a receipt is in a segment, or in the ledger that the log names
    as live."""
    require(there, "B6", f"{message} has a receipt and is nowhere")


@invariant("B7")
def a_consumer_passes_over_nothing(
    ghost: Ghost, who: str, partition: int, left_out: list[int]
) -> None:
    """What a subscription's consumers are not given was acknowledged, and what a reader is given
    begins where it asked and leaves nothing out."""
    what = f"{who} is not given offsets {left_out[:5]} of partition {partition}"
    require(not left_out, "B7", f"{what}, which nobody acknowledged")


@invariant("B8")
def a_durable_position_never_goes_back(
    ghost: Ghost, name: str, partition: int, found: int | None, durable: int
) -> None:
    """The next owner of a subscription finds it at its durable position, or further."""
    what = f"subscription {name}, partition {partition}: durable at {durable}, found at {found}"
    require(found is not None and found >= durable, "B8", what)


@invariant("B9")
def a_producer_that_comes_back_hears_how_far_it_came(
    ghost: Ghost, name: str, told: int, received: int
) -> None:
    """For a topic with deduplication: the last sequence id that a broker gives a producer is not
    below one that the producer has a receipt for."""
    require(told >= received, "B9", f"producer {name} is told {told}, it had receipt {received}")


@invariant("B10")
def all_who_use_brokers_come_to_the_end(ghost: Ghost, waiting: list[str]) -> None:
    """Liveness: once all is well each batch has its receipt, and consumers get all there is."""
    require(not waiting, "B10", f"not done: {', '.join(waiting[:5])}")


@invariant("B11")
def what_is_decided_waits_no_more(ghost: Ghost, left: dict[str, int]) -> None:
    """When no producer waits any more, no broker's memory counts bytes of batches that do: what is
    counted for ever stops its connections in the end."""
    require(not any(left.values()), "B11", f"bytes that wait for nobody: {left}")


@invariant("B12")
def what_was_sought_comes_first(
    ghost: Ghost, who: str, sought: tuple[int, int], offset: int, end: int
) -> None:
    """Once a seek is answered, also of one to a time or of a subscription that was deleted and made
    again, the first message that comes is the one that was sought."""
    lo, hi = sought
    what = f"{who} is at offsets {lo} to {hi} by a seek, and is given {offset} to {end} first"
    require(offset <= hi and end > lo, "B12", what)


@invariant("B13")
def a_deleted_subscription_is_gone(ghost: Ghost, name: str, there: bool) -> None:
    """When the only consumer of a subscription hears that it is deleted, the store has it no
    more."""
    require(not there, "B13", f"subscription {name} was deleted, and is there")


@invariant("B14")
def one_consumer_is_given_messages_at_a_time(
    ghost: Ghost, place: Any, who: str, active: str
) -> None:
    """A broker sends the messages of a failover subscription only to the active one of the present
    consumers."""
    require(who == active, "B14", f"{place}: {who} is sent a message, active is '{active}'")


@invariant("B15")
def who_is_fenced_stores_no_more(ghost: Ghost, message: Any, epoch: int, newest: int) -> None:
    """Messages of exclusive producers to one owner of a partition are in the order in which the
    producers had the access."""
    require(epoch >= newest, "B15", f"{message} of epoch {epoch} comes after one of {newest}")


@invariant("B15")
def who_is_alone_is_not_fenced(ghost: Ghost, who: str, others: list[str]) -> None:
    """A producer that may fence others is itself refused only if others want to be the only one,
    however often it comes back, and to whichever owner."""
    require(bool(others), "B15", f"{who} is fenced, and is the only one that wants to be")


@invariant("B17")
def a_message_in_chunks_is_whole(ghost: Ghost, who: str, names: list[Any], must: list[Any]) -> None:
    """The chunks that a last chunk names, and those that a consumer is given one after another, are
    those of one message, each once and in order."""
    require(names == must, "B17", f"{who}: chunks {names}, a message has {must}")


@invariant("B17")
def chunks_of_a_message_have_one_id(ghost: Ghost, who: str, first: int, got: int) -> None:
    """The receipts of a message's chunks have the offset of its last one."""
    require(got == first, "B17", f"{who}: receipts of one message have offsets {first} and {got}")


@invariant("B18")
def the_last_message_is_the_last_with_a_row(
    ghost: Ghost, who: str, answered: int, has_row: bool, given: int, confirmed: int
) -> None:
    """A consumer that asks for the last message hears of one that is confirmed and has a row, and
    that is not before what it was given on that connection: so it knows whether it has all."""
    what = f"{who} hears that offset {answered} is the last, was given up to {given}"
    right = given <= answered < confirmed and (has_row or answered < 0)
    row = "has a row" if has_row else "has none"
    require(right, "B18", f"{what}; it {row}, and {confirmed} offsets are confirmed")


@invariant("B16")
def a_read_has_what_had_a_receipt_before(
    ghost: Ghost, partition: int, found: int, told: int
) -> None:
    """A reader that reads once, as a batch of Spark does, gets an end that is not below the
    receipts that producers had when the read began, except those of an owner that is dead or stands
    still."""
    what = f"a read of partition {partition} ends at {found}, a receipt was for up to {told}"
    require(found >= told, "B16", what)


@invariant("B19")
def a_row_is_pending_at_one_consumer(
    ghost: Ghost, name: str, partition: int, twice: list[int]
) -> None:
    """Of a subscription that several consumers share, a row that was sent is pending at one of them
    and does not wait to be sent again."""
    what = f"subscription {name}, partition {partition}: offsets {twice[:5]}"
    require(not twice, "B19", f"{what} are pending twice, or pending and waiting")


@invariant("B20")
def a_count_is_of_requests(ghost: Ghost, reader: str, offset: int, count: int, asked: int) -> None:
    """A message's redelivery count is raised by requests for it alone."""
    what = f"{reader} gets offset {offset} for the {count}. time again"
    require(count <= asked, "B20", f"{what}, and it was asked for {asked} times")


@invariant("B21")
def no_more_is_sent_than_asked_for(ghost: Ghost, reader: str, offset: int, permits: int) -> None:
    """A consumer is sent a batch only while it has a permit left."""
    require(permits > 0, "B21", f"{reader} gets offset {offset} with {permits} permits left")


@invariant("B22")
def what_has_a_receipt_is_not_sent_again(
    ghost: Ghost, reader: str, partition: int, again: list[int]
) -> None:
    """A consumer that comes after the receipt of an acknowledgement does not get the message, but
    for a seek or a deletion since."""
    what = f"{reader} gets offsets {again[:5]} of partition {partition} again"
    require(not again, "B22", f"{what}, whose acknowledgements have receipts")


@invariant("B23")
def a_slot_is_at_one_consumer(ghost: Ghost, name: str, partition: int, shared: list[int]) -> None:
    """Of a subscription that consumers share by keys, the rows of a slot that were sent and are not
    acknowledged are at one consumer."""
    what = f"subscription {name}, partition {partition}: slots {shared[:5]}"
    require(not shared, "B23", f"{what} are at several consumers")


@invariant("B24")
def a_key_is_in_order(ghost: Ghost, name: str, partition: int, before: int, offset: int) -> None:
    """Consumers that share a subscription by keys, and ask for nothing again, are given the rows of
    a key in order: each consumer on one connection, and all of them together where a row comes for
    the first time."""
    what = f"subscription {name}, partition {partition}: offset {offset} comes after {before}"
    require(offset > before, "B24", f"{what} of its key")


@invariant("B25")
def no_delayed_message_is_early(
    ghost: Ghost, consumer: str, offset: int, due_ms: int, now_ms: int
) -> None:
    """A consumer that shares a subscription is not given a delayed message before its time, by the
    store's clock."""
    fault = f"{consumer} gets offset {offset} {due_ms - now_ms} ms before its time"
    require(now_ms >= due_ms, "B25", fault)
