"""Verbs on clusters, tenants and namespaces."""

from contextlib import suppress
from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.admin.policies import (
    ANONYMOUS,
    check_clusters,
    from_pulsar,
    switch,
    to_pulsar,
)
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.log.policies import INHERIT, NamespacePolicies
from spark_ledger.topic.log.records import TenantRecord
from spark_ledger.topic.upkeep.admin import TopicAdmin


async def clusters(call: Call) -> Any:
    return [call.cluster]


# -- tenants ---------------------------------------------------------------------------------------


async def tenants(call: Call) -> Any:
    return await call.namespaces.tenants()


async def tenant(call: Call) -> Any:
    record = await call.namespaces.tenant(call.tenant)
    return {
        "adminRoles": list(record.admin_roles),
        "allowedClusters": list(record.allowed_clusters) or [call.cluster],
    }


async def create_tenant(call: Call) -> None:
    await call.namespaces.create_tenant(call.tenant, _tenant_of(call))


async def change_tenant(call: Call) -> None:
    await call.namespaces.change_tenant(call.tenant, _tenant_of(call))


async def delete_tenant(call: Call) -> None:
    await call.namespaces.delete_tenant(call.tenant)


def _tenant_of(call: Call) -> TenantRecord:
    plain = call.json()
    if not isinstance(plain, dict):
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            'a tenant is {"adminRoles": [], "allowedClusters": ["' + call.cluster + '"]}',
        )
    clusters, roles = plain.get("allowedClusters") or [], plain.get("adminRoles") or []
    if not clusters:
        raise HttpRefusal(HTTPStatus.PRECONDITION_FAILED, "Clusters can not be empty")
    check_clusters(clusters, call.cluster)
    if not isinstance(roles, list) or any(role != ANONYMOUS for role in roles):
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"rights are not built yet, so no adminRoles but {ANONYMOUS} are taken",
        )
    return TenantRecord(tuple(roles), tuple(clusters))


# -- namespaces ------------------------------------------------------------------------------------


async def namespaces_of_tenant(call: Call) -> Any:
    return await call.namespaces.of_tenant(call.tenant)


async def namespace(call: Call) -> Any:
    await call.namespaces.check(call.namespace)
    policies = await call.client.topics.namespace(call.namespace) or NamespacePolicies()
    return to_pulsar(policies, call.cluster)


async def create_namespace(call: Call) -> None:
    policies = from_pulsar(call.json(), call.cluster)
    await call.namespaces.create(call.namespace, policies)


async def delete_namespace(call: Call) -> None:
    """With `force` its topics go first, one by one; the namespace goes once it is empty."""
    if call.is_on("force"):
        await call.namespaces.check(call.namespace)
        admin = TopicAdmin(call.client)
        names = [info.name.full for info in await call.client.topics.of(call.namespace)]

        async def delete(name: str) -> None:
            with suppress(errors.TopicNotFound):
                await admin.delete(name)

        await call_each(delete, names)
    await call.namespaces.delete(call.namespace)


async def topics_of_namespace(call: Call) -> Any:
    await call.namespaces.check(call.namespace)
    if call.request.query.get("mode") == "NON_PERSISTENT":
        return []
    return await call.broker.catalog.names_in(call.namespace)


async def set_deduplication(call: Call) -> None:
    await _set(call, {"deduplication": switch(call.json())})


async def unset_deduplication(call: Call) -> None:
    await _set(call, {"deduplication": INHERIT})


async def _set(call: Call, changes: dict[str, Any]) -> None:
    await call.namespaces.check(call.namespace)
    await call.client.topics.set_namespace(call.namespace, changes)
