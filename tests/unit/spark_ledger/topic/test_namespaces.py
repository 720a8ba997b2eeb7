"""Tenants and namespaces, made and deleted."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.topic.log.policies import NamespacePolicies
from spark_ledger.topic.log.records import TenantRecord
from spark_ledger.topic.upkeep.namespaces import Namespaces
from tests.unit.spark_ledger.topic.stage import play


def namespaces_of(client):
    return Namespaces(client.store, client.rng)


def test_a_tenant_is_made_once_changed_and_deleted_when_it_is_empty():
    async def act(stage):
        namespaces = namespaces_of(stage.client)
        await namespaces.create_tenant("acme", TenantRecord(("admin",), ("here",)))

        other = namespaces_of(await stage.another())
        assert await other.tenants() == ["acme", "public"]
        assert await other.tenant("acme") == TenantRecord(("admin",), ("here",))
        with pytest.raises(errors.NamespaceExists, match="tenant 'acme'"):
            await other.create_tenant("acme", TenantRecord())
        await other.change_tenant("acme", TenantRecord(("x",)))
        assert await namespaces.tenant("acme") == TenantRecord(("x",))
        await namespaces.create("acme/a", NamespacePolicies())
        with pytest.raises(errors.NamespaceInUse, match="has namespaces"):
            await namespaces.delete_tenant("acme")
        await namespaces.delete("acme/a")
        await namespaces.delete_tenant("acme")
        assert await namespaces.tenants() == ["public"]
        for verb in (namespaces.tenant, namespaces.delete_tenant, namespaces.of_tenant):
            with pytest.raises(errors.NamespaceNotFound, match="no tenant 'acme'"):
                await verb("acme")
        with pytest.raises(errors.NamespaceNotFound):
            await namespaces.change_tenant("acme", TenantRecord())

    play(act)


def test_a_namespace_is_there_from_its_making_to_its_deletion():
    async def act(stage):
        namespaces = namespaces_of(stage.client)
        with pytest.raises(errors.NamespaceNotFound, match="no tenant 'acme'"):
            await namespaces.create("acme/a", NamespacePolicies())
        await namespaces.create_tenant("acme", TenantRecord())
        with pytest.raises(errors.NamespaceNotFound, match="no namespace 'acme/a'"):
            await namespaces.check("acme/a")
        await namespaces.create("acme/a", NamespacePolicies(auto_create=False))

        await namespaces.check("acme/a")
        assert await namespaces.of_tenant("acme") == ["acme/a"]
        policies = await stage.client.topics.namespace("acme/a")
        assert policies == NamespacePolicies(auto_create=False)
        with pytest.raises(errors.NamespaceExists):
            await namespaces.create("acme/a", NamespacePolicies())
        await stage.client.topics.create("acme/a/t", makes_namespace=False)
        with pytest.raises(errors.NamespaceInUse, match="has topics"):
            await namespaces.delete("acme/a")
        await stage.client.topics.delete("acme/a/t")
        await namespaces.delete("acme/a")
        with pytest.raises(errors.NamespaceNotFound):
            await namespaces.delete("acme/a")
        with pytest.raises(errors.NamespaceNotFound):
            await stage.client.topics.create("acme/a/t", makes_namespace=False)
        assert await namespaces.of_tenant("acme") == []

    play(act)


def test_public_default_is_always_there():
    async def act(stage):
        namespaces = namespaces_of(stage.client)
        await namespaces.check("public/default")
        assert await namespaces.of_tenant("public") == ["public/default"]
        with pytest.raises(errors.NamespaceExists):
            await namespaces.create("public/default", NamespacePolicies())
        with pytest.raises(errors.NamespaceExists):
            await namespaces.create_tenant("public", TenantRecord())
        for verb, name in (
            (namespaces.delete, "public/default"),
            (namespaces.delete_tenant, "public"),
        ):
            with pytest.raises(errors.NamespaceInUse, match="always exists"):
                await verb(name)
        await namespaces.change_tenant("public", TenantRecord(("x",)))
        await namespaces.create("public/other", NamespacePolicies())
        assert await namespaces.of_tenant("public") == ["public/default", "public/other"]

    play(act)


def test_making_and_deleting_end_well_while_answers_are_lost():
    async def act(stage):
        stage.world.store.faults.unknown = 0.4
        namespaces = namespaces_of(stage.client)
        for number in range(10):
            tenant = f"t{number}"
            await namespaces.create_tenant(tenant, TenantRecord((tenant,)))
            await namespaces.create(f"{tenant}/n", NamespacePolicies(topics={"retention_ms": 5}))
            assert await namespaces.of_tenant(tenant) == [f"{tenant}/n"]
            await namespaces.delete(f"{tenant}/n")
            await namespaces.delete_tenant(tenant)
        assert await namespaces.tenants() == ["public"]

    play(act, seed=3)


def test_of_two_who_make_a_namespace_at_once_one_does():
    async def act(stage):
        names = [namespaces_of(stage.client), namespaces_of(await stage.another())]
        policies = [NamespacePolicies(auto_create=flag) for flag in (True, False)]
        made = await asyncio.gather(
            *(of.create("public/n", p) for of, p in zip(names, policies, strict=True)),
            return_exceptions=True,
        )
        assert sorted(isinstance(outcome, errors.NamespaceExists) for outcome in made) == [0, 1]
        winner = policies[made.index(None)]
        assert await stage.client.topics.namespace("public/n") == winner

    play(act)


@pytest.mark.parametrize("name", ["", ".", "a b", "a/b/c", "é"])
def test_a_bad_name_is_refused(name):
    async def act(stage):
        namespaces = namespaces_of(stage.client)
        with pytest.raises(errors.TopicNameInvalid):
            await namespaces.create_tenant(name, TenantRecord())
        with pytest.raises(errors.TopicNameInvalid):
            await namespaces.create(f"public/{name}", NamespacePolicies())

    play(act)
