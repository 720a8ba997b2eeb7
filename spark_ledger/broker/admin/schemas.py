"""Verbs on the schemas of a topic that Pulsar's clients declare."""

import re
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from spark_ledger import errors
from spark_ledger.broker import schemas
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.names import NonPersistentName
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema import client_schemas
from spark_ledger.topic.schema.client_rules import producer_misfit
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType, ClientVersion

VERSIONS_AT_ONCE = 32
BODY_BYTES_MAX = 512 << 10
"""Of a request: the largest schema (client_schemas.DATA_BYTES_MAX) with the escapes of JSON."""
_NUMBER = re.compile(r"[0-9]{1,18}")


async def latest(call: Call) -> Any:
    info = await _topic(call)
    declared = (await call.broker.schemas_of(info).of(info)).client_versions
    if not declared:
        raise HttpRefusal(HTTPStatus.NOT_FOUND, f"topic {call.name.topic} has no schema for Pulsar")
    return await _to_json(call, info, declared[-1])


async def version(call: Call) -> Any:
    """Also one that was deleted without force: messages may have it."""
    number = call.request.parts["version"]
    info = await _topic(call)
    registered = await call.broker.schemas_of(info).of(info)
    declared = registered.client_version(int(number)) if _NUMBER.fullmatch(number) else None
    if declared is None:
        raise HttpRefusal(
            HTTPStatus.NOT_FOUND, f"the topic has no version {number!r} of its schema"
        )
    return await _to_json(call, info, declared)


async def versions(call: Call) -> Any:
    info = await _topic(call)
    declared = (await call.broker.schemas_of(info).of(info)).client_versions
    shown = await call_each(partial(_to_json, call, info), declared, VERSIONS_AT_ONCE)
    return {"getSchemaResponses": shown}


async def register(call: Call) -> Any:
    """As a producer does: a topic that is not there is made, if clients may make it."""
    schema = await _schema_in_body(call)
    try:
        info = await _topic(call)
    except errors.TopicNotFound:
        info = await call.broker.catalog.find(call.name.topic, create=True)
    try:
        declared = await schemas.declare(call.broker.schemas_of(info), info, schema)
    except errors.SchemaIncompatible as error:
        raise HttpRefusal(HTTPStatus.CONFLICT, str(error)) from error
    return {"version": {"version": declared.number}}


async def delete(call: Call) -> Any:
    """With `force` messages of old versions find no schema any more. -1: there was none."""
    info = await _topic(call)
    last = await call.broker.schemas_of(info).delete_for_clients(info, erase=call.is_on("force"))
    return {"version": -1 if last is None else last}


async def compatibility(call: Call) -> Any:
    info, schema = await _topic(call), await _schema_in_body(call)
    declared = (await call.broker.schemas_of(info).of(info)).client_versions
    misfit = await schemas.misfit(info, schema, declared, producer_misfit)
    strategy = info.policies.schema_compatibility.upper()
    return {"compatibility": misfit is None, "schemaCompatibilityStrategy": strategy}


async def version_of(call: Call) -> Any:
    """The number of the version that has the same schema as the request's body."""
    schema = await _schema_in_body(call)
    declared = await schemas.find(schema, await _versions(call))
    if declared is not None:
        return {"version": declared.number}
    raise HttpRefusal(HTTPStatus.NOT_FOUND, "no version of the topic's schema is this schema")


async def _versions(call: Call) -> tuple[ClientVersion, ...]:
    """Raises errors.TopicNotFound."""
    info = await _topic(call)
    return (await call.broker.schemas_of(info).of(info)).client_versions


async def _topic(call: Call) -> TopicInfo:
    """As Call.existing_topic; without it the topic of this name whose messages are only in memory:
    the paths of these verbs name no kind of topics."""
    try:
        return await call.existing_topic()
    except errors.TopicNotFound:
        topic = call.name.topic
        name = NonPersistentName(topic.tenant, topic.namespace, topic.name)
        info = await call.broker.non_persistent.find(name)
        if info is None:
            raise
        return info


async def _schema_in_body(call: Call) -> ClientSchema:
    """Raises HttpRefusal, errors.SchemaUnreadable."""
    plain = call.json()
    if not isinstance(plain, dict) or not isinstance(plain.get("type"), str):
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST,
            'a schema is {"type": "JSON", "schema": "...", "properties": {}}',
        )
    text, properties = plain.get("schema") or "", plain.get("properties") or {}
    is_text = isinstance(text, str) and isinstance(properties, dict)
    if not is_text or not all(isinstance(value, str) for value in properties.values()):
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, "`schema` is text, `properties` are texts")
    kind = ClientSchemaType.__members__.get(plain["type"])
    if kind is None or kind in client_schemas.UNDECLARED:
        raise HttpRefusal(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no type of schemas {plain['type'][:100]!r}"
        )
    if kind is ClientSchemaType.KEY_VALUE:
        data = client_schemas.pair_from_text(text)
    else:
        data = text.encode() if kind in client_schemas.WITH_DATA else b""
    schema = ClientSchema(kind, data, MappingProxyType(properties))
    await schemas.check(schema)
    return schema


async def _to_json(call: Call, info: TopicInfo, declared: ClientVersion) -> dict[str, Any]:
    schema = declared.schema
    return {
        "version": declared.number,
        "type": schema.kind.name,
        "timestamp": await call.broker.schemas_of(info).registered_ms(info, declared.number),
        "data": _data(schema),
        "properties": dict(schema.properties),
    }


def _data(schema: ClientSchema) -> str:
    if schema.kind is ClientSchemaType.KEY_VALUE:
        with suppress(errors.SchemaUnreadable, *errors.MALFORMED):  # not checked by older programs
            return client_schemas.pair_to_text(schema)
    return schema.data.decode(errors="replace")
