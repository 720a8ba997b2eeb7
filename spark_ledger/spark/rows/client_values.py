"""Values that Pulsar's clients encoded by their schemas, in a read with valueFormat=schema.

Always true: the columns of a topic are those of the newest version when the query begins, or of the
newest version that has the columns that the query declares; a run of a query stays with its
version. Typed rows of the topic have the columns of their own versions. A value that cannot be
decoded is handled by onBadEntry, a message that names no version by onOtherFormat, as a row of
bytes among columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.spark.rows.other_format import OnOtherFormat, OtherRows
from spark_ledger.spark.rows.typed_values import ValueReader
from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_numpy
from spark_ledger.topic.entry.message_batch import CLIENT_VERSION
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.bad_entries import BadEntries, BadRows, OnBadEntry
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.schema import rules as schema_rules
from spark_ledger.topic.schema.client_schemas import ClientVersion
from spark_ledger.topic.schema.registry import TopicSchema, not_registered
from spark_ledger.topic.values.reader import ClientReader, client_reader

BAD_REMEDY = "Read on with onBadEntry=skip, or read the value with valueFormat=binary."
NOT_REGISTERED_REMEDY = (
    "Read the topic with valueFormat=binary, or json and .schema(...). A topic gets a schema from a"
    " producer that declares one, or from the first write with valueFormat=arrow."
)
OTHER_REMEDY = "Give onOtherFormat=skip or null, or read the values with valueFormat=binary."


class ReadSchema(NamedTuple):
    """The payload's columns in a read: None if the declared columns cannot be compared with the
    topics' columns. `clients` read the values of topics for which clients declared schemas, by the
    topics' short names."""

    columns: pa.Schema | None
    clients: Mapping[str, ClientReader]

    @property
    def with_version(self) -> bool:
        """Whether the values of a topic are bytes, which a user decodes by the version."""
        return any(not reader.has_columns for reader in self.clients.values())


def read_schema_of(
    schemas: Sequence[tuple[TopicInfo, TopicSchema]],
    declared: pa.Schema | None,
    kept: dict[str, ClientReader],
) -> ReadSchema:
    """The columns of a read with valueFormat=schema. `declared` are the payload's columns that the
    user declared, canonical. `kept` has the readers of this run of the query, by topic id.

    Raises errors.SchemaNotRegistered for a topic of bytes, errors.SchemaIncompatible, and the
    errors of client_reader.
    """
    by_topic: list[pa.Schema] = []
    clients: dict[str, ClientReader] = {}
    for topic, schema in schemas:
        columns = [schema.union] if schema.versions else []
        versions = _versions(schema)
        if versions:
            reader = _reader(topic, schema, versions, declared, kept)
            clients[topic.name.short] = reader
            columns.append(reader.columns)
        if not columns:
            raise _not_registered(topic, schema)
        by_topic = [*columns, *by_topic]  # the columns of the first topic come first
    try:
        return ReadSchema(schema_rules.union(by_topic), clients)
    except errors.SchemaIncompatible:
        if declared is None:
            raise
        return ReadSchema(None, clients)


def _not_registered(topic: TopicInfo, schema: TopicSchema) -> errors.SchemaNotRegistered:
    what = not_registered(topic).what
    if schema.head.erased >= 0:
        what += " any more: it was deleted with force, so stored rows have no columns"
    return errors.SchemaNotRegistered(what, NOT_REGISTERED_REMEDY)


def _versions(schema: TopicSchema) -> list[ClientVersion]:
    """The versions that messages name and that are stored, oldest first: those that clients
    declared, and those of the columns of Spark's rows, beside which clients write JSON. A deleted
    version is among them, unless it was deleted with force."""
    last = schema.head.number_for_clients(schema.head.last)
    versions = map(schema.client_version, range(last + 1))
    return [version for version in versions if version is not None]


def _reader(
    topic: TopicInfo,
    schema: TopicSchema,
    versions: Sequence[ClientVersion],
    declared: pa.Schema | None,
    kept: dict[str, ClientReader],
) -> ClientReader:
    last = kept.get(topic.id)
    if last is not None and list(last.versions) == [version.number for version in versions]:
        return last
    number, head = None if last is None else last.number, schema.head
    deleted, erased = map(head.number_for_clients, (head.deleted, head.erased))
    try:
        first = -head.number_for_clients(0)
        reader = client_reader(versions, first, declared, number, deleted=deleted, erased=erased)
    except errors.LedgerError as error:
        what = f"topic '{topic.name}', the schema that clients declared: {error.what}"
        raise type(error)(what, error.remedy, **error.facts) from error
    kept[topic.id] = reader
    return reader


class Payload(NamedTuple):
    """Rows with the topic's numbers of their versions, their payload's columns, and the mask of the
    rows that the read gives (None: all rows)."""

    rows: Block
    columns: list[pa.Array]
    kept: pa.Array | None


class ClientPayloads:
    """The payloads of clients' values in one task."""

    def __init__(self, values: ValueReader, others: OtherRows, on_bad_entry: str) -> None:
        self._values = values
        self._others = others
        self._on_bad_entry = OnBadEntry(on_bad_entry)
        self._bad: dict[str, BadEntries] = {}  # by topic
        self.topics = values.clients.keys()

    def of(self, rows: Block, topic: str) -> Payload:
        """Raises errors.BadEntry, errors.SchemaIncompatible."""
        reader, schema = self._values.clients[topic], self._values.payload
        numbered = _with_topic_numbers(reader, rows)
        if not len(reader.columns):  # the topic has none of the declared columns
            nulls = [pa.nulls(rows.num_rows, kind) for kind in schema.types]
            return Payload(numbered, nulls, None)
        decoded = reader.read(rows)
        kept = np.ones(rows.num_rows, dtype=np.bool_)
        without_version = np.flatnonzero(decoded.without_version)
        if len(without_version):
            self._accept_without_version(rows, topic, without_version)
            kept[without_version] = self._others.policy is OnOtherFormat.NULL
        bad = self._bad.setdefault(topic, BadEntries(topic, self._on_bad_entry))
        _handle_bad(decoded.bad, rows, bad)
        kept[list(decoded.bad)] = False
        columns = self._values.conformed(decoded.columns, rows, topic)
        return Payload(numbered, columns, None if bool(kept.all()) else of_numpy(kept))

    def end(self) -> None:
        """Log the counts of bad values."""
        for bad in self._bad.values():
            bad.log_counts()

    def _accept_without_version(
        self, rows: Block, topic: str, numbers: npt.NDArray[np.int64]
    ) -> None:
        if self._others.policy is OnOtherFormat.FAIL:
            partition, offset = rows.place_of(int(numbers[0]))
            raise errors.SchemaIncompatible(
                f"topic {topic!r}, partition {partition}, offset {offset}: the row is bytes whose"
                " message names no version of the topic's schema",
                OTHER_REMEDY,
            )
        self._others.accept(rows, topic, numbers)


def _handle_bad(bad_rows: Mapping[int, str], rows: Block, bad: BadEntries) -> None:
    if not bad_rows:
        return
    ledgers, entries = rows.row_values("ledger"), rows.row_values("entry")
    for row in sorted(bad_rows):
        partition, offset = rows.place_of(row)
        place = BadRows(partition, offset, offset + 1, int(ledgers[row]), int(entries[row]))
        what = f"the value cannot be decoded: {bad_rows[row]}"
        bad.count_or_raise(place, errors.BadEntry(what, BAD_REMEDY))


def _with_topic_numbers(reader: ClientReader, rows: Block) -> Block:
    """The rows, with the topic's numbers of their versions in place of the clients' numbers."""
    batch = rows.record_batch
    index = batch.schema.get_field_index(CLIENT_VERSION)
    if index < 0 or not reader.first_for_clients:
        return rows
    column = batch.column(index)
    valid = as_numpy(column.is_valid())
    numbers = np.where(valid, as_numpy(column) + reader.first_for_clients, 0).astype(np.int32)
    return replace(rows, record_batch=batch.set_column(index, CLIENT_VERSION, of_numpy(numbers)))
