"""Values of Pulsar's clients in a block of rows, as a read has them."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import avro.io
import avro.schema
import numpy as np
import pyarrow as pa
from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from spark_ledger.topic.entry.message_batch import CLIENT_VERSION, KEY, VALUE
from spark_ledger.topic.read.row_blocks import RUN, Block
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType, ClientVersion
from spark_ledger.topic.values.reader import ClientReader, client_reader


def record(*fields: Any, name: str = "R") -> dict[str, Any]:
    """A record of these fields, each a name and a type, and maybe a default."""
    plain = [dict(zip(("name", "type", "default"), field, strict=False)) for field in fields]
    return {"type": "record", "name": name, "fields": plain}


def descriptors(
    root: str, *fields: str, imports: Sequence[str] = ("q/other.proto",)
) -> dict[str, str]:
    """The data of a schema of PROTOBUF_NATIVE: a message of these fields, in the package q. Its
    file imports files; q/other.proto is there."""
    file = FileDescriptorProto(name="q/root.proto", package="q", dependency=imports)
    message = file.message_type.add(name=root)
    for number, name in enumerate(fields, 1):
        message.field.add(name=name, number=number, type=FieldDescriptorProto.TYPE_INT32)
    files = FileDescriptorSet(file=[file, FileDescriptorProto(name="q/other.proto", package="q")])
    return {
        "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": f"q.{root}",
        "rootFileDescriptorName": "q/root.proto",
    }


def avro_bytes(plain: Any, value: Any) -> bytes:
    """The value as Avro's own library encodes it."""
    out = io.BytesIO()
    writer = avro.io.DatumWriter(avro.schema.parse(json.dumps(plain)))
    writer.write(value, avro.io.BinaryEncoder(out))
    return out.getvalue()


def avro_value(data: bytes, writer: Any, reader: Any) -> Any:
    """The value as Avro's own library decodes it."""
    schemas = [avro.schema.parse(json.dumps(plain)) for plain in (writer, reader)]
    return avro.io.DatumReader(*schemas).read(avro.io.BinaryDecoder(io.BytesIO(data)))


def schema_of(
    kind: str, plain: Any = None, data: bytes = b"", properties: Mapping[str, str] | None = None
) -> ClientSchema:
    encoded = data if plain is None else json.dumps(plain).encode()
    return ClientSchema(ClientSchemaType[kind], encoded, properties or {})


def reader_of(*schemas: ClientSchema, declared: pa.Schema | None = None) -> ClientReader:
    versions = [ClientVersion(i, schema) for i, schema in enumerate(schemas)]
    return client_reader(versions, 1, declared)


def block_of(
    values: Sequence[bytes | None],
    numbers: Sequence[int | None] | None = None,
    keys: Sequence[bytes | None] | None = None,
) -> Block:
    """The values, which name these versions (None: all name version 0)."""
    runs = np.zeros(1, RUN)
    runs["rows"] = len(values)
    columns = {
        VALUE: pa.array(values, pa.binary()),
        CLIENT_VERSION: pa.array([0] * len(values) if numbers is None else numbers, pa.int32()),
    }
    if keys is not None:
        columns[KEY] = pa.array(keys, pa.binary())
    return Block(runs, pa.record_batch(columns))


def rows_of(reader: ClientReader, *given: Any) -> list[Any]:
    """The rows as dicts; None for a bad row."""
    found = reader.read(block_of(*given))
    found.columns.validate(full=True)
    rows = found.columns.to_pylist()
    return [None if i in found.bad else row for i, row in enumerate(rows)]


def json_text(value: Any) -> bytes:
    return json.dumps(value).encode()
