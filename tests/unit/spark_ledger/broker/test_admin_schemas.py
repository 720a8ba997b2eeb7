"""The admin API's verbs on schemas, and the policies by which schemas are compared."""

import asyncio
import json

import pytest

from spark_ledger.topic.log.policies import SCHEMA_STRATEGIES
from spark_ledger.topic.schema import client_schemas
from tests.unit.spark_ledger.broker.admin_requests import at_a_broker

S = "/admin/v2/schemas/public/default/t"
N = "/admin/v2/namespaces/public/default"
A = {"name": "a", "type": "int"}
B = {"name": "b", "type": "int"}
AVRO_KEY = {"key.schema.type": "AVRO", "value.schema.type": "STRING"}


def schema(*fields, **more):
    data = json.dumps({"type": "record", "name": "R", "fields": fields})
    return {"type": "JSON", "schema": data, "properties": {"p": "q"}, **more}


def test_a_schema_that_is_registered_is_returned_by_its_version():
    async def act(ask, broker, stage):
        for path in ("schema", "schema/0"):
            assert (await ask("GET", f"{S}/{path}"))[0] == 404
        assert await ask("GET", f"{S}/schemas") == (200, {"getSchemaResponses": []})
        assert await ask("POST", f"{S}/compatibility", schema(A)) == (
            200,
            {"compatibility": True, "schemaCompatibilityStrategy": "FULL"},
        )
        assert await ask("POST", f"{S}/schema", schema(A)) == (200, {"version": {"version": 0}})
        assert await ask("POST", f"{S}/schema", schema(A)) == (200, {"version": {"version": 0}})
        status, body = await ask("GET", f"{S}/schema")
        assert (status, body["version"], body["type"]) == (200, 0, "JSON")
        assert body["data"] == schema(A)["schema"] and body["properties"] == {"p": "q"}
        assert await ask("GET", f"{S}/schema/0") == (200, body)
        assert await ask("GET", f"{S}/schemas") == (200, {"getSchemaResponses": [body]})
        assert await ask("POST", f"{S}/version", schema(A)) == (200, {"version": 0})
        status, why = await ask("POST", f"{S}/schema", schema(A, B))
        assert status == 409 and "field 'b' is not in the values" in why["reason"]
        for path in ("schema/1", "schema/x", "schema/-1"):
            assert (await ask("GET", f"{S}/{path}"))[0] == 404
        assert (await ask("POST", f"{S}/version", schema(A, B)))[0] == 404
        answer = await ask("POST", f"{S}/compatibility", schema(A, B))
        assert answer[1]["compatibility"] is False

    at_a_broker(act)


def pair(key, value, *types):
    names = ("key.schema.type", "value.schema.type")
    return {
        "type": "KEY_VALUE",
        "schema": json.dumps({"key": key, "value": value}),
        "properties": dict(zip(names, types, strict=True)),
    }


@pytest.mark.parametrize("key_type", ["JSON", "STRING"])
def test_a_schema_of_key_and_value_is_taken_and_shown_as_an_object_of_both(key_type):
    record = {"type": "record", "name": "é", "fields": [A]}
    key = record if key_type == "JSON" else ""
    body = pair(key, record, key_type, "AVRO")

    async def act(ask, broker, stage):
        assert await ask("POST", f"{S}/schema", body) == (200, {"version": {"version": 0}})
        assert await ask("POST", f"{S}/version", body) == (200, {"version": 0})
        assert (await ask("POST", f"{S}/compatibility", body))[1]["compatibility"] is True
        info = await stage.client.topics.open("t")
        kept = (await broker.schemas_of(info).of(info)).client_version(0).schema
        parts = [part.data for part in client_schemas.key_and_value(kept)]
        assert [json.loads(data) if data else "" for data in parts] == [key, record]
        status, shown = await ask("GET", f"{S}/schema")
        assert (status, shown["type"], shown["properties"]) == (200, *list(body.values())[::2])
        assert json.loads(shown["data"]) == {"key": key, "value": record}
        assert await ask("GET", f"{S}/schemas") == (200, {"getSchemaResponses": [shown]})
        again = body | {"schema": shown["data"]}
        assert await ask("POST", f"{S}/version", again) == (200, {"version": 0})

    at_a_broker(act)


@pytest.mark.parametrize("first", [schema(A), {"type": "STRING", "schema": ""}])
def test_a_schema_is_shown_with_the_time_at_which_it_was_registered(first):
    async def act(ask, broker, stage):
        assert (await ask("POST", f"{S}/schema", first))[0] == 200
        await asyncio.sleep(10)
        await stage.client.topics.change_policies(
            "t", {"schema_compatibility": "always_compatible"}
        )
        assert (await ask("POST", f"{S}/schema", schema(A, B)))[0] == 200
        _, shown = await ask("GET", f"{S}/schemas")
        times_ms = [each["timestamp"] for each in shown["getSchemaResponses"]]
        assert times_ms[0] > 1_600_000_000_000 and 10_000 <= times_ms[1] - times_ms[0] < 11_000
        assert (await ask("GET", f"{S}/schema"))[1]["timestamp"] == times_ms[1]
        assert (await ask("GET", f"{S}/schema/0"))[1]["timestamp"] == times_ms[0]

    at_a_broker(act)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (5, 400),
        ({}, 400),
        ({"type": 5}, 400),
        ({"type": "JSON", "schema": 5}, 400),
        ({"type": "JSON", "schema": "{}", "properties": {"a": 1}}, 400),
        ({"type": "JSON", "schema": "{}", "properties": [1]}, 400),
        ({"type": "JSON", "schema": "\ud800"}, 400),
        ({"type": "STRING", "properties": {"\ud800": "\ud800"}}, 400),
        ({"type": "ROMAN", "schema": ""}, 422),
        ({"type": "NONE", "schema": ""}, 422),
        ({"type": "AUTO_CONSUME", "schema": ""}, 422),
        ({"type": "JSON", "schema": "{}"}, 422),
        ({"type": "AVRO", "schema": "[" * 1_500}, 422),
        ({"type": "KEY_VALUE", "schema": ""}, 422),
        ({"type": "KEY_VALUE", "schema": "[" * 60_000}, 422),
        ({"type": "KEY_VALUE", "schema": '["key", "value"]'}, 422),
        ({"type": "KEY_VALUE", "schema": '{"key": ""}'}, 422),
        ({"type": "KEY_VALUE", "schema": '{"key": "", "value": "\\ud800"}'}, 422),
        ({"type": "KEY_VALUE", "schema": '{"key": {}, "value": ""}', "properties": AVRO_KEY}, 422),
    ],
)
def test_what_is_no_schema_is_refused_by_each_verb_and_nothing_is_registered(body, status):
    async def act(ask, broker, stage):
        for verb in ("schema", "compatibility", "version"):
            answer = await ask("POST", f"{S}/{verb}", body)
            assert answer[0] == status and answer[1]["reason"]
        assert await ask("GET", f"{S}/schemas") == (200, {"getSchemaResponses": []})

    at_a_broker(act)


def test_schemas_of_a_topic_or_namespace_that_is_not_there_are_404():
    async def act(ask, broker, stage):
        for topic in ("public/default/none", "public/none/t"):
            for method, verb, body in (
                ("GET", "schema", None),
                ("GET", "schemas", None),
                ("DELETE", "schema", None),
                ("POST", "compatibility", schema(A)),
            ):
                answer = await ask(method, f"/admin/v2/schemas/{topic}/{verb}", body)
                assert answer[0] == 404

    at_a_broker(act)


def test_a_schema_that_is_posted_makes_its_topic_where_clients_may_make_one():
    async def act(ask, broker, stage):
        made = "/admin/v2/schemas/public/default/made"
        creation = f"{N}/autoTopicCreation"
        await ask("POST", creation, {"allowAutoTopicCreation": False})
        assert (await ask("POST", f"{made}/schema", schema(A)))[0] == 404
        await ask(
            "POST", creation, {"allowAutoTopicCreation": True, "topicType": "non-partitioned"}
        )
        assert (await ask("POST", f"{made}/schema", {"type": "JSON", "schema": "{}"}))[0] == 422
        assert (await ask("GET", f"{made}/schema"))[1]["reason"].startswith("[LEDGER_TOPIC")
        assert await ask("POST", f"{made}/schema", schema(A)) == (200, {"version": {"version": 0}})
        assert (await ask("GET", f"{made}/schema"))[1]["version"] == 0
        answer = await ask("POST", "/admin/v2/schemas/public/none/t/schema", schema(A))
        assert answer[0] == 404

    at_a_broker(act)


@pytest.mark.parametrize("force", ["false", "true"])
def test_a_deleted_schema_counts_no_more_and_numbers_go_on(force):
    async def act(ask, broker, stage):
        assert await ask("DELETE", f"{S}/schema") == (200, {"version": -1})
        assert (await ask("POST", f"{S}/schema", schema(A)))[0] == 200
        assert await ask("DELETE", f"{S}/schema?force={force}") == (200, {"version": 0})
        assert (await ask("GET", f"{S}/schema"))[0] == 404
        assert await ask("GET", f"{S}/schemas") == (200, {"getSchemaResponses": []})
        old = await ask("GET", f"{S}/schema/0")
        assert old[0] == (404 if force == "true" else 200)
        other = schema({"name": "a", "type": "string"})
        assert await ask("POST", f"{S}/schema", other) == (200, {"version": {"version": 1}})
        assert await ask("POST", f"{S}/version", other) == (200, {"version": 1})
        versions = (await ask("GET", f"{S}/schemas"))[1]["getSchemaResponses"]
        assert [version["version"] for version in versions] == [1]
        assert (await ask("POST", f"{S}/schema", schema(A)))[0] == 409
        assert await ask("DELETE", f"{S}/schema") == (200, {"version": 1})
        assert await ask("POST", f"{S}/schema", schema(A)) == (200, {"version": {"version": 2}})

    at_a_broker(act)


def test_text_that_is_declared_after_a_deletion_is_a_version_of_its_own():
    async def act(ask, broker, stage):
        text = {"type": "STRING", "schema": ""}
        assert await ask("POST", f"{S}/schema", text) == (200, {"version": {"version": 0}})
        assert await ask("DELETE", f"{S}/schema") == (200, {"version": 0})
        assert await ask("POST", f"{S}/schema", text) == (200, {"version": {"version": 1}})

    at_a_broker(act)


def test_the_policies_of_a_namespace_are_set_and_unset_and_count():
    async def act(ask, broker, stage):
        strategy = f"{N}/schemaCompatibilityStrategy"
        assert await ask("GET", strategy) == (200, "UNDEFINED")
        for name in SCHEMA_STRATEGIES:
            assert (await ask("PUT", strategy, name.upper()))[0] == 204
            assert await ask("GET", strategy) == (200, name.upper())
        assert (await ask("PUT", strategy, "BACKWARD"))[0] == 204
        assert (await ask("POST", f"{S}/schema", schema(A, B)))[0] == 200
        assert (await ask("POST", f"{S}/schema", schema(A)))[0] == 200
        assert (await ask("PUT", strategy, "UNDEFINED"))[0] == 204
        assert (await ask("POST", f"{S}/schema", schema(A, B, type="AVRO")))[0] == 409
        for bad in ("SIDEWARD", 5, None, ["FULL"], {}):
            assert (await ask("PUT", strategy, bad))[0] == 400
        for name, default in (
            ("schemaValidationEnforced", False),
            ("isAllowAutoUpdateSchema", True),
        ):
            assert await ask("GET", f"{N}/{name}") == (200, default)
            assert (await ask("POST", f"{N}/{name}", not default))[0] == 204
            assert await ask("GET", f"{N}/{name}") == (200, not default)
            assert (await ask("POST", f"{N}/{name}", "yes"))[0] == 400
        policies = (await ask("GET", N))[1]
        assert policies["schema_validation_enforced"] is True
        assert policies["is_allow_auto_update_schema"] is False

    at_a_broker(act)
