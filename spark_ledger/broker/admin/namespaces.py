"""Verbs on clusters, tenants and namespaces."""

from contextlib import suppress
from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker.admin import non_persistent
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.admin.policies import ANONYMOUS, check_clusters, from_pulsar
from spark_ledger.broker.admin.policy_verbs import enough_bookies
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.log.policies import NamespacePolicies
from spark_ledger.topic.log.records import TenantRecord
from spark_ledger.topic.upkeep.admin import TopicAdmin


async def clusters(call: Call) -> Any:
    return [call.cluster]


async def cluster(call: Call) -> Any:
    if call.request.parts["cluster"] != call.cluster:
        raise HttpRefusal(
            HTTPStatus.NOT_FOUND, f"Cluster does not exist: this is cluster {call.cluster}"
        )
    ownership = call.broker.ownership
    return {"serviceUrl": ownership.membership.admin_url, "brokerServiceUrl": ownership.url}


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
    body = call.json()
    if not isinstance(body, dict):
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            'a tenant is {"adminRoles": [], "allowedClusters": ["' + call.cluster + '"]}',
        )
    clusters, roles = body.get("allowedClusters") or [], body.get("adminRoles") or []
    if not clusters:
        raise HttpRefusal(HTTPStatus.PRECONDITION_FAILED, "Clusters can not be empty")
    check_clusters(clusters, call.cluster)
    if not isinstance(roles, list) or any(role != ANONYMOUS for role in roles):
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"rights are not implemented yet: adminRoles may only have {ANONYMOUS}",
        )
    return TenantRecord(tuple(roles), tuple(clusters))


# -- namespaces ------------------------------------------------------------------------------------


async def namespaces_of_tenant(call: Call) -> Any:
    return await call.namespaces.of_tenant(call.tenant)


async def create_namespace(call: Call) -> None:
    policies = from_pulsar(call.json(), call.cluster)
    with enough_bookies():
        await TopicAdmin(call.client).check_namespace(call.namespace, NamespacePolicies(), policies)
    await call.namespaces.create(call.namespace, policies)


async def delete_namespace(call: Call) -> None:
    """With `force` the topics of the namespace are deleted first, each by itself. The namespace is
    deleted only if no topic is left."""
    if call.is_on("force"):
        await call.namespaces.check(call.namespace)
        admin = TopicAdmin(call.client)
        topics = await call.client.topics.in_namespace(call.namespace)
        names = [topic.name.full for topic in topics]

        async def delete(name: str) -> None:
            with suppress(errors.TopicNotFound):
                await admin.delete(name)

        await call_each(delete, names)
        await non_persistent.delete_all(call)
    elif await non_persistent.names_in(call):
        raise errors.NamespaceInUse(f"namespace '{call.namespace}' has non-persistent topics")
    await call.namespaces.delete(call.namespace)


async def topics_of_namespace(call: Call) -> Any:
    mode, topics = call.choice("mode", ("PERSISTENT", "NON_PERSISTENT", "ALL")), list[str]()
    if mode != "NON_PERSISTENT":
        topics += await call.broker.catalog.names_in(call.namespace)
    if mode != "PERSISTENT":
        topics += await non_persistent.names_in(call)
    return topics
