"""Every error that a user can meet, in the order of what the caller does next.

The code that raises an error gives a text of what is wrong; `LedgerError` makes it one line,
`[LEDGER_X.Y] what is wrong, with the value. Remedy.` Facts are fields. Errors of kazoo, grpc and
the operating system never leave the file that owns them.
"""

import re

MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What decoding malformed bytes may raise, also valid JSON: `1e999` is infinity, and no integer;
lists may be nested a thousand deep."""


class LedgerError(Exception):
    """Base of all errors of Spark Ledger. `error_class` is stable and listed in docs/errors.md."""

    error_class, sql_state = "LEDGER.INTERNAL", "XX000"
    remedy = "Report this with the log."

    def __init__(self, what: str, remedy: str | None = None, **facts: object) -> None:
        self.what = what.rstrip(".")
        self.facts = facts
        if remedy is not None:
            self.remedy = remedy
        super().__init__(f"[{self.error_class}] {self.what}. {self.remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.remedy, self.facts)


def counted(number: int, noun: str) -> str:
    """A number and a noun for a sentence: "1 ledger", "2 ledgers"."""
    return f"{number} {noun}" + "s" * (number != 1)


def _rebuild(kind: type[LedgerError], what: str, remedy: str, facts: dict[str, object]) -> object:
    return kind(what, remedy, **facts)


# -- try again -------------------------------------------------------------------------------


class Unavailable(LedgerError):
    """The metadata store or the bookies cannot be reached now."""

    error_class, sql_state = "LEDGER_UNAVAILABLE", "08001"
    remedy = "Check that the cluster is up (`spark-ledger status`) and the service URL is right."


class NotEnoughBookies(LedgerError):
    """Fewer bookies respond than the quorum needs. No entry of the call was acknowledged."""

    error_class, sql_state = "LEDGER_WRITE.NOT_ENOUGH_BOOKIES", "53000"
    remedy = "Start the missing bookies or write with a smaller ensemble."


class TimedOut(LedgerError):
    """An operation did not end in its time; an append may or may not have been stored."""

    error_class, sql_state = "LEDGER_WRITE.TIMEOUT", "08006"
    remedy = "Check whether the rows are there before you write them again."


class MetadataHeld(Unavailable):
    """The metadata store is older than a bookie's disk, or a copy of another store: no process gets
    ledger ids, commits or registers until an operator accepts it. Nothing was committed."""

    error_class, sql_state = "LEDGER_METADATA.HELD", "55000"
    remedy = (
        "Put the newest copy of the metadata store back, or accept this one as it is: `spark-ledger"
        " metadata accept` first lists the ledgers that this store does not name."
    )


# -- outcome unknown: look before repeating ---------------------------------------------------


class CommitOutcomeUnknown(LedgerError):
    """A commit was sent, and may or may not have been applied. Replaying it is safe."""

    error_class, sql_state = "LEDGER_WRITE.OUTCOME_UNKNOWN", "08007"
    remedy = "Run the same batch again from its checkpoint: it is committed once."


# -- a batch whose number is used up ----------------------------------------------------------


class CheckpointBehind(LedgerError):
    """A query's batch has a number below the last one committed. Nothing of it was written."""

    error_class, sql_state = "LEDGER_WRITE.CHECKPOINT_BEHIND", "40001"
    remedy = "Restore the newest checkpoint, start with a new one, or write with onReplay=append."


class ReplayDiffers(LedgerError):
    """A query's batch was committed under this number with other rows. Nothing was committed."""

    error_class, sql_state = "LEDGER_WRITE.REPLAY_DIFFERS", "40001"
    remedy = "Restore the newest checkpoint, start with a new one, or give onReplay skip or append."


# -- the handle is dead -----------------------------------------------------------------------


class LedgerFenced(LedgerError):
    """Another process took over, or closed the ledger: this writer can add no more entries."""

    error_class, sql_state = "LEDGER_WRITE.FENCED", "40001"
    remedy = (
        "Another run has taken over: stop this one. Without another run, autorecovery closed the "
        "ledger of a writer that it could not see: go on in a new ledger."
    )


class LedgerClosed(LedgerError):
    """The ledger is closed: nothing can be added."""

    error_class, sql_state = "LEDGER_WRITE.CLOSED", "55019"
    remedy = "Create a new ledger."


class ClientClosed(LedgerError):
    """The client, with its writers and readers, was closed, maybe while this call was under way."""

    error_class, sql_state = "LEDGER_CLIENT.CLOSED", "08003"
    remedy = "Make a new client; an append under way may or may not have been stored."

    def __init__(
        self, what: str = "this client was closed", remedy: str | None = None, **facts: object
    ) -> None:
        super().__init__(what, remedy, **facts)


class LedgerNotClosed(LedgerError):
    """Only a closed ledger can be deleted: this one may have a writer."""

    error_class, sql_state = "LEDGER_WRITE.NOT_CLOSED", "55000"
    remedy = "Close or recover it first."


class LedgerInUse(LedgerError):
    """The ledger was made for a topic: only maintenance deletes such ledgers."""

    error_class, sql_state = "LEDGER_WRITE.IN_USE", "55006"
    remedy = "Delete the topic (`spark-ledger topic delete`); its ledgers go with it, later."


# -- not there --------------------------------------------------------------------------------


class NoSuchLedger(LedgerError):
    error_class, sql_state = "LEDGER_DATA_LOSS.LEDGER_MISSING", "22000"
    remedy = "It was deleted, or the service URL names another cluster."


class NoSuchEntry(LedgerError):
    """The requested entry is beyond the end of a closed ledger, or is not confirmed."""

    error_class, sql_state = "LEDGER_OFFSETS.OUT_OF_RANGE", "22003"
    remedy = "Read up to last_add_confirmed."


class DataUnavailable(LedgerError):
    """A confirmed entry cannot be read now: its bookies are unreachable or respond *unknown*."""

    error_class, sql_state = "LEDGER_UNAVAILABLE", "08001"
    remedy = "Start the bookies named; confirmed data is never given up."


# -- the data or the request is bad -----------------------------------------------------------


class DigestMismatch(LedgerError):
    error_class, sql_state = "LEDGER_DATA_LOSS.CHECKSUM", "22000"
    remedy = "Every copy of the entry is damaged; restore the bookies' disks."


class Unauthorized(LedgerError):
    error_class, sql_state = "LEDGER_WRITE.UNAUTHORIZED", "28000"
    remedy = "Give the ledger's password."


class MessageTooBig(LedgerError):
    error_class, sql_state = "LEDGER_WRITE.MESSAGE_TOO_BIG", "54000"
    remedy = "Make the row smaller or raise entry_bytes_max on bookies and clients."


class RecordTooBig(LedgerError):
    """A ledger's record would not fit into the metadata store. Nothing was written."""

    error_class, sql_state = "LEDGER_WRITE.RECORD_TOO_BIG", "54000"
    remedy = "Keep less in the ledger's custom metadata, and large values in its entries."


class BadConfig(LedgerError):
    error_class, sql_state = "LEDGER_CONFIG.INVALID", "22023"
    remedy = "Correct the setting; conf/ lists every one with its meaning."


# -- what a Spark user gives and reads ----------------------------------------------------------


class OptionMissing(LedgerError):
    error_class, sql_state = "LEDGER_OPTION.MISSING", "22023"
    remedy = "Add the option."


class OptionInvalid(LedgerError):
    error_class, sql_state = "LEDGER_OPTION.INVALID_VALUE", "22023"
    remedy = "Correct the option's value."


class OptionUnknown(LedgerError):
    error_class, sql_state = "LEDGER_OPTION.UNKNOWN", "42703"
    remedy = "Correct its name or leave it out."


class OptionConflict(LedgerError):
    error_class, sql_state = "LEDGER_OPTION.CONFLICT", "42613"
    remedy = "Give one of them."


class NewerSparkNeeded(LedgerError):
    """The version of Spark that runs cannot do what an option or a call requests."""

    error_class, sql_state = "LEDGER_OPTION.NEWER_SPARK_NEEDED", "0A000"
    remedy = "Leave it out, or run Spark 4.2."


class OffsetsMalformed(LedgerError):
    error_class, sql_state = "LEDGER_OFFSETS.MALFORMED", "22023"
    remedy = 'Give earliest, latest or JSON as {"topic":{"0":23,"1":-2}} (-2 earliest, -1 latest).'


class OffsetsNotAssigned(LedgerError):
    """Offsets name a topic or partition that is not read, or lack one that is read."""

    error_class, sql_state = "LEDGER_OFFSETS.NOT_ASSIGNED", "22023"
    remedy = "Name each partition of each topic that is read, and no other."


class OffsetsOutOfRange(LedgerError):
    error_class, sql_state = "LEDGER_OFFSETS.OUT_OF_RANGE", "22003"
    remedy = "Stay within the rows that the topic has, or give earliest or latest."


class OffsetOfAnotherStore(LedgerError):
    """The rows before an offset have changed since the reader took the offset: the metadata store
    was restored from an older backup, and lacks rows that were committed later, or all copies of
    rows with page-cache durability were lost."""

    error_class, sql_state = "LEDGER_DATA_LOSS.OFFSET_OF_ANOTHER_STORE", "22000"
    remedy = (
        "Bring back the newer metadata store, if an older one was restored; or start with a new"
        " checkpoint and startingOffsets; or set failOnDataLoss to false to read on from that"
        " offset, without the rows before it."
    )


class OffsetsStartAfterEnd(LedgerError):
    error_class, sql_state = "LEDGER_OFFSETS.START_AFTER_END", "22003"
    remedy = "Give startingOffsets at or before endingOffsets."


class TimestampNotFound(LedgerError):
    """No row was committed at or after the time at which a read is to start."""

    error_class, sql_state = "LEDGER_OFFSETS.TIMESTAMP_NOT_FOUND", "22003"
    remedy = "Give an earlier time, or startingOffsetsByTimestampStrategy latest or earliest."


class SchemaMissingColumn(LedgerError):
    error_class, sql_state = "LEDGER_SCHEMA.MISSING_COLUMN", "42703"
    remedy = "Select it, for example with selectExpr('key', 'to_json(struct(*)) AS value')."


class SchemaUnknownColumn(LedgerError):
    error_class, sql_state = "LEDGER_SCHEMA.UNKNOWN_COLUMN", "42703"
    remedy = "Leave it out or pack it into value."


class SchemaTypeMismatch(LedgerError):
    error_class, sql_state = "LEDGER_SCHEMA.TYPE_MISMATCH", "42K09"
    remedy = "Cast the column."


class SchemaIncompatible(LedgerError):
    """Columns or rows do not fit the topic's schema, or the schema of a read."""

    error_class, sql_state = "LEDGER_SCHEMA.INCOMPATIBLE", "42K09"
    remedy = "Use columns that fit the schema, or let it grow with schemaMode=evolve."


class SchemaReservedColumn(LedgerError):
    error_class, sql_state = "LEDGER_SCHEMA.RESERVED_COLUMN", "42K05"
    remedy = "Rename it: that name is of one of the columns that a read adds."


class SchemaNotRegistered(LedgerError):
    """A read or write needs the topic's registered schema, and the topic has none."""

    error_class, sql_state = "LEDGER_SCHEMA.NOT_REGISTERED", "42704"
    remedy = (
        "Declare the columns with .schema(...); where the topic has rows of bytes, give"
        " onOtherFormat=skip or null too. A topic without rows of bytes gets its schema by the"
        " first write with valueFormat=arrow."
    )


class SchemaUnreadable(LedgerError):
    """A client declares a schema whose data is not what its type needs."""

    error_class, sql_state = "LEDGER_SCHEMA.UNREADABLE", "22023"
    remedy = "Declare a schema that the client's library made."


class NullTopic(LedgerError):
    """A row to be written names no topic, and no option does."""

    error_class, sql_state = "LEDGER_NULL_TOPIC_IN_DATA", "22004"
    remedy = "Fill the column topic in every row, or name the topic with option topic."


# -- topics -----------------------------------------------------------------------------------


class TopicNameInvalid(LedgerError):
    error_class, sql_state = "LEDGER_TOPIC.INVALID_NAME", "42K05"
    remedy = "A topic is `name` or `persistent://tenant/namespace/name`."


class TopicNotFound(LedgerError):
    error_class, sql_state = "LEDGER_TOPIC.NOT_FOUND", "42704"
    remedy = "Create it with `spark-ledger topic create NAME`, or correct the name."


class TopicExists(LedgerError):
    error_class, sql_state = "LEDGER_TOPIC.ALREADY_EXISTS", "42710"
    remedy = "Choose another name, or use the topic that is there."


class NamespaceNotFound(LedgerError):
    """There is no such namespace, or no such tenant."""

    error_class, sql_state = "LEDGER_TOPIC.NAMESPACE_NOT_FOUND", "42704"
    remedy = "Make it with `spark-ledger namespace set TENANT/NAME`, or correct the name."


class NamespaceExists(LedgerError):
    error_class, sql_state = "LEDGER_TOPIC.NAMESPACE_ALREADY_EXISTS", "42710"
    remedy = "Choose another name, or use the one that is there."


class NamespaceInUse(LedgerError):
    error_class, sql_state = "LEDGER_TOPIC.NAMESPACE_IN_USE", "2BP01"
    remedy = "Delete what is in it first."


class TopicDeleted(LedgerError):
    """The topic was deleted while it was in use."""

    error_class, sql_state = "LEDGER_DATA_LOSS.TOPIC_DELETED", "22000"
    remedy = "Create the topic again and start with a new checkpoint."


class TopicRecreated(LedgerError):
    """Offsets or rows are of an earlier topic of this name; the name means another topic now."""

    error_class, sql_state = "LEDGER_DATA_LOSS.TOPIC_RECREATED", "22000"
    remedy = "Start with a new checkpoint: offsets of the old topic mean nothing in the new one."


class RowsTrimmed(LedgerError):
    """Rows that a read asks for were removed by retention or by hand. `facts` has their number."""

    error_class, sql_state = "LEDGER_DATA_LOSS.TRIMMED", "22000"
    remedy = "Read on with failOnDataLoss=false; keep rows longer, or hold them by a subscription."


class PartitionRemoved(LedgerError):
    """A checkpoint names a partition that the topic does not have, or that is not read any more."""

    error_class, sql_state = "LEDGER_DATA_LOSS.PARTITION_REMOVED", "22000"
    remedy = (
        "Read the partitions that the checkpoint names, set failOnDataLoss to false to go on"
        " without them, or start with a new checkpoint."
    )


class RowsLost(LedgerError):
    """Committed rows are beyond the end of a closed ledger. `facts` names the rows."""

    error_class, sql_state = "LEDGER_DATA_LOSS.ROWS_MISSING", "22000"
    remedy = "Restore the bookies' disks, or read on with failOnDataLoss=false."


class UnsupportedFormat(LedgerError):
    """A record was written by a newer version, or is damaged: no part of it is used."""

    error_class, sql_state = "LEDGER_TOPIC.UNSUPPORTED_FORMAT", "0A000"
    remedy = "Upgrade spark-ledger to the version that writes this cluster."


class BadEntry(UnsupportedFormat):
    """Stored bytes with a valid checksum that no version of Spark Ledger writes: another program
    wrote them, or they contradict themselves."""

    error_class, sql_state = "LEDGER_TOPIC.BAD_ENTRY", "22000"
    remedy = "Read on with onBadEntry=skip, or look at the bytes with onBadEntry=raw."


class CommitContended(LedgerError):
    """Other writers won every time. Nothing was committed."""

    error_class, sql_state = "LEDGER_TXN.CONFLICT", "40001"
    remedy = "Run the batch again, or commit to this topic from fewer jobs at once."


class TxnConflict(LedgerError):
    """The state from which the commit was planned has changed. Nothing was committed."""

    error_class, sql_state = "LEDGER_TXN.CONFLICT", "40001"
    remedy = "Look at the topic as it is now and plan again."


class TxnVersionRequired(LedgerError):
    error_class, sql_state = "LEDGER_TXN.VERSION_REQUIRED", "22023"
    remedy = "Give txnVersion, a number that rises with each batch of that txnAppId."


class TopicTerminated(LedgerError):
    error_class, sql_state = "LEDGER_TOPIC.TERMINATED", "55019"
    remedy = "Write to another topic."


class CommitOverTooManyTopics(LedgerError):
    """A batch has more topics than one commit can have. No row was written; topics that the batch's
    tasks had already made stay, empty, and the error of the write names them."""

    error_class, sql_state = "LEDGER_OPTION.TOO_MANY_TOPICS", "54000"
    remedy = "Write fewer topics in one batch, or one topic with more partitions."


class BacklogQuotaExceeded(LedgerError):
    """The topic's subscriptions leave more unread than its policies allow, and the policy
    `on_backlog` does not take new rows then. No row of the commit is visible."""

    error_class, sql_state = "LEDGER_WRITE.BACKLOG_QUOTA", "53400"
    remedy = (
        "Let the subscription consume, move it (`spark-ledger subscription seek`), or raise the"
        " quota; then write again."
    )


class CommitTooBig(LedgerError):
    error_class, sql_state = "LEDGER_WRITE.COMMIT_TOO_BIG", "54000"
    remedy = "Write with fewer tasks or partitions per batch."


class PartitionInvalid(LedgerError):
    """A row names a partition that the topic does not have (routing by column)."""

    error_class, sql_state = "LEDGER_WRITE.PARTITION_INVALID", "22023"
    remedy = (
        "Make or grow the topic with as many partitions, or give option routing, as hash: it goes"
        " before the column partition."
    )


class ColumnTypeMismatch(LedgerError):
    error_class, sql_state = "LEDGER_SCHEMA.TYPE_MISMATCH", "42K09"
    remedy = "Cast key and value to STRING or BINARY."


# -- subscriptions ------------------------------------------------------------------------------


class SubscriptionNotFound(LedgerError):
    error_class, sql_state = "LEDGER_SUBSCRIPTION.NOT_FOUND", "42704"
    remedy = (
        "Correct the name, or create it with `spark-ledger subscription create TOPIC NAME`; a query"
        " with option subscription creates it at its start."
    )


class SubscriptionExists(LedgerError):
    error_class, sql_state = "LEDGER_SUBSCRIPTION.ALREADY_EXISTS", "42710"
    remedy = "Choose another name, or use the subscription that is there."


class SubscriptionBusy(LedgerError):
    """Another query, or consumers, use the subscription, or did until not long ago."""

    error_class, sql_state = "LEDGER_SUBSCRIPTION.BUSY", "55006"
    remedy = (
        "Stop the query or the consumers that use it, or choose another name; a query that reads a"
        " topic twice needs two. A query that was killed keeps it for some minutes, unless you take"
        " it away: spark-ledger subscription seek TOPIC NAME --to here --force."
    )


class CopyGone(LedgerError):
    """The copy of a subscription's acknowledgements by which a query plans was removed."""

    error_class, sql_state = "LEDGER_SUBSCRIPTION.COPY_GONE", "55000"
    remedy = (
        "Start the query with a new checkpoint and startingSubscription: a copy is kept until the"
        " query has read beyond it, and for 30 days after the query used it last."
    )


class SubscriptionMoved(LedgerError):
    """Consumers, another query or an operator moved a query's subscription while the query was not
    running."""

    error_class, sql_state = "LEDGER_SUBSCRIPTION.MOVED", "40001"
    remedy = (
        "Give onSubscriptionMoved=checkpoint to go on by the checkpoint, or"
        " onSubscriptionMoved=subscription to go on where the subscription is now."
    )


# -- our error behind one of Spark's -----------------------------------------------------------

_OURS = re.compile(r"\[LEDGER(?:_[A-Z]+)*(?:\.[A-Z_]+)?\] [^\n]*")
_STACKS = ("_stackTrace", "_stacktrace")
"""The attributes in which PySpark's exceptions (and Spark Connect's) keep the text of the JVM's
exception, with all its causes."""


def cause_of(error: object) -> str | None:
    """The first `[LEDGER_...] what is wrong. What to do.` in a text, or in an exception of Spark's
    and its causes; None without such a line. (If Delta's sink wraps the error of a task, our error
    is only in a cause, and Python's text of Spark's exception does not show it.)

        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            print(spark_ledger.cause_of(error) or error)
    """
    for text in _texts_of(error):
        match = _OURS.search(text)
        if match is not None:
            return match[0].strip()
    return None


def _texts_of(error: object) -> list[str]:
    """The texts of the error, and of the errors that caused it."""
    seen: list[object] = []
    texts: list[str] = []
    while error is not None and not any(error is earlier for earlier in seen):
        seen.append(error)
        kept = (getattr(error, name, None) for name in _STACKS)
        texts += [str(error), *(text for text in kept if isinstance(text, str))]
        error = getattr(error, "_cause", None) or getattr(error, "__cause__", None)
    return texts
