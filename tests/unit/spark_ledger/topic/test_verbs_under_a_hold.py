"""Every write that a user asks for is refused while the metadata store is held: the newest copy
that is put back, or an accept, would contradict it."""

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.metadata import hold, paths, unrecorded
from spark_ledger.metadata.cluster import Hold
from spark_ledger.repair import decommission
from spark_ledger.topic.log.topics import Topics
from spark_ledger.topic.schema.client_rules import Strategy
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType
from spark_ledger.topic.schema.records import Compatibility
from spark_ledger.topic.schema.registry import SchemaRegistry
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.subscription.subscriptions import Subscriptions
from spark_ledger.topic.upkeep import live_repair
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.simulation.restoring import copied
from tests.simulation.world import CLUSTER_ID
from tests.unit.spark_ledger.topic.stage import Stage, play

WHY = Hold("link 7 is not in it", "b1")
FIELDS = pa.schema([("a", pa.int64())])
QUORUM = {"write_quorum": 2}

VERBS = {
    "Topics.create": lambda s: s.client.topics.create("new"),
    "Topics.delete": lambda s: s.client.topics.delete("t"),
    "Topics.change_policies": lambda s: s.client.topics.change_policies("t", QUORUM),
    "Topics.change_properties": lambda s: s.client.topics.change_properties("t", {"a": "b"}),
    "Topics.note_growth": lambda s: s.client.topics.note_growth(s.topic, 2),
    "Topics.set_namespace": lambda s: s.client.topics.set_namespace("public/default", QUORUM),
    "Topics.change_namespace": lambda s: s.client.topics.change_namespace(
        "public/default", lambda _: QUORUM
    ),
    "TopicAdmin.create": lambda s: TopicAdmin(s.client).create("new"),
    "TopicAdmin.delete": lambda s: TopicAdmin(s.client).delete("t"),
    "TopicAdmin.change_policies": lambda s: TopicAdmin(s.client).change_policies("t", QUORUM),
    "TopicAdmin.grow": lambda s: TopicAdmin(s.client).grow("t", 2),
    "TopicAdmin.terminate": lambda s: TopicAdmin(s.client).terminate("t"),
    "TopicAdmin.trim": lambda s: TopicAdmin(s.client).trim("t", {0: 1}, force=True),
    "TopicAdmin.set_namespace": lambda s: TopicAdmin(s.client).set_namespace(
        "public/default", QUORUM
    ),
    "Subscriptions.create": lambda s: s.client.subscriptions.create(s.topic.id, "new", End.LATEST),
    "Subscriptions.create_for_consumers": lambda s: s.client.subscriptions.create_for_consumers(
        s.topic.id, "new", {0: 0}
    ),
    "Subscriptions.open": lambda s: s.client.subscriptions.open(s.topic, "new", "q", "run"),
    "Subscriptions.delete": lambda s: s.client.subscriptions.delete(s.topic.id, "s"),
    "Subscriptions.seek": lambda s: s.client.subscriptions.seek(s.topic.id, "s", {0: 1}),
    "Subscriptions.move_up": lambda s: s.client.subscriptions.move_up(
        s.topic.id, "s", lambda *_: 1
    ),
    "SchemaRegistry.register": lambda s: s.client.schemas.register(s.topic, FIELDS),
    "SchemaRegistry.for_write": lambda s: s.client.schemas.for_write(s.topic, FIELDS),
    "SchemaRegistry.withdraw": lambda s: s.client.schemas.withdraw(s.typed),
    "SchemaRegistry.set_compatibility": lambda s: s.client.schemas.set_compatibility(
        s.topic, Compatibility.NONE
    ),
    "SchemaRegistry.register_client": lambda s: s.client.schemas.register_client(
        s.topic, ClientSchema(ClientSchemaType.INT32), Strategy.FULL
    ),
    "SchemaRegistry.delete_for_clients": lambda s: s.client.schemas.delete_for_clients(
        s.typed, erase=False
    ),
    "LedgerStore.delete": lambda s: s.client.ledgers.delete(s.closed),
    "decommission.forget": lambda s: decommission.forget(s.client.ledgers, "gone"),
    "unrecorded.name_as_deleted": lambda s: unrecorded.name_as_deleted(s.client.store, [s.unnamed]),
}
READS = {
    "Topics": {
        "open",
        "find",
        "id_of",
        "name_of",
        "list",
        "names",
        "inherited_policies",
        "namespace",
        "namespaces",
        "in_namespace",
        "again",
        "names_in",
        "listed",
        "own_policies",
        "check_room",
    },
    "TopicAdmin": {"describe", "check_namespace"},
    "Subscriptions": {
        "list",
        "used_by_consumers",
        "is_of_query",
        "positions",
        "lag",
        "holds",
        "reserve",
        "close",
    },
    "SchemaRegistry": {
        "of",
        "for_read",
        "forget",
        "client_version",
        "registered_ms",
        "number_for_clients",
        "has_columns",
    },
}
OF_A_HOLD = (paths.CLUSTER, paths.LEDGER_IDS, paths.INTENTS, paths.QUERIES, paths.TXNS)
"""What the hold itself writes, and intents, which end by themselves."""


async def filled(stage: Stage) -> None:
    """What the verbs are about."""
    intent = await stage.intent()
    await stage.commit(intent, 0, await stage.written(intent, [b"a", b"b"]))
    await stage.client.subscriptions.create(stage.topic.id, "s", {0: 0})
    await stage.client.topics.create("deleted")
    await stage.client.topics.delete("deleted")
    stage.typed = await stage.client.topics.create("typed")
    await stage.client.schemas.register(stage.typed, FIELDS)
    writer = await stage.client.ledgers.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    await writer.append(b"x")
    await writer.close()
    stage.closed = writer.ledger_id
    stage.unnamed = (await stage.client.ledgers.allocate_ids(1))[0]
    await stage.client.store.create(f"{paths.BOOKIES_KNOWN}/gone", parents=True)
    await stage.client.topics.set_namespace("public/default", {"retention_ms": 10**9})


async def held(stage: Stage) -> None:
    await hold.put(stage.world.store.session("bookie"), CLUSTER_ID, WHY)


def nodes(stage: Stage) -> dict[str, bytes]:
    there = copied(stage.world.store).items()
    return {path: node.value for path, node in there if not path.startswith(OF_A_HOLD)}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_refused_under_a_hold_and_changes_nothing(verb):
    async def act(stage):
        await filled(stage)
        await held(stage)
        before = nodes(stage)
        with pytest.raises(errors.MetadataHeld, match="metadata accept"):
            await VERBS[verb](stage)
        assert nodes(stage) == before

    play(act)


@pytest.mark.parametrize("verb", VERBS)
def test_a_hold_that_comes_just_before_the_verbs_multi_stops_it(verb):
    async def act(stage):
        await filled(stage)
        before, multi = nodes(stage), stage.client.store.multi

        async def multi_beside_a_bookie(operations):
            await held(stage)
            await multi(operations)

        stage.client.store.multi = multi_beside_a_bookie
        with pytest.raises(errors.MetadataHeld):
            await VERBS[verb](stage)
        assert nodes(stage) == before

    play(act)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if "unrecorded" not in verb])
def test_a_verb_goes_through_once_a_person_accepted(verb):
    async def act(stage):
        await filled(stage)
        await held(stage)
        with pytest.raises(errors.MetadataHeld):
            await VERBS[verb](stage)
        await hold.accept(stage.world.store.session("person"))
        before = nodes(stage)
        if verb in ("TopicAdmin.grow", "TopicAdmin.terminate", "TopicAdmin.trim"):
            with pytest.raises(errors.LedgerFenced):  # this process remembers the store before
                await VERBS[verb](stage)
        await VERBS[verb](stage)
        assert nodes(stage) != before

    play(act)


@pytest.mark.parametrize("kind", [Topics, TopicAdmin, Subscriptions, SchemaRegistry])
def test_each_method_is_known_as_a_verb_or_as_a_read(kind):
    methods = {name for name, method in vars(kind).items() if callable(method) and name[0] != "_"}
    verbs = {name.partition(".")[2] for name in VERBS if name.partition(".")[0] == kind.__name__}
    assert methods - READS[kind.__name__] == verbs


def test_consumers_of_a_subscription_go_on_under_a_hold():
    async def act(stage):
        await filled(stage)
        await held(stage)
        cursor = await stage.client.subscriptions.open(stage.topic, "s", "q", "run")
        assert (await cursor.recovered()) == {0: 0}

    play(act)


def test_no_partition_is_reported_as_one_that_can_be_opened():
    async def act(stage):
        assert await live_repair.find_unopened(stage.client, stage.topic) == []
        await held(stage)
        with pytest.raises(errors.MetadataHeld, match="metadata accept"):
            await live_repair.find_unopened(stage.client, stage.topic)

    play(act)
