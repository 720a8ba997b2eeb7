"""Verbs on clusters, tenants and namespaces."""

from contextlib import suppress
from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.admin.policies import (
    ANONYMOUS,
    QUOTAS,
    SCHEMA_AUTO_UPDATE,
    SCHEMA_STRATEGY,
    SCHEMA_VALIDATION,
    STORAGE,
    auto_creation,
    auto_creation_of,
    backlog_quota,
    check_clusters,
    checked_bool,
    from_pulsar,
    message_ttl,
    quotas,
    schema_strategy_named,
    schema_strategy_of,
    to_pulsar,
    ttl_of,
)
from spark_ledger.http import HttpResponse
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.log.policies import INHERIT, NAMESPACE_NAMES, NamespacePolicies
from spark_ledger.topic.log.records import TenantRecord
from spark_ledger.topic.upkeep.admin import TopicAdmin


async def clusters(call: Call) -> Any:
    return [call.cluster]


async def health(call: Call) -> Any:
    """The response shows that this broker takes requests."""
    return "ok"


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
            f"rights are not built yet: adminRoles may only have {ANONYMOUS}",
        )
    return TenantRecord(tuple(roles), tuple(clusters))


# -- namespaces ------------------------------------------------------------------------------------


async def namespaces_of_tenant(call: Call) -> Any:
    return await call.namespaces.of_tenant(call.tenant)


async def namespace(call: Call) -> Any:
    return to_pulsar(await _policies(call), call.cluster)


async def create_namespace(call: Call) -> None:
    policies = from_pulsar(call.json(), call.cluster)
    await call.namespaces.create(call.namespace, policies)


async def delete_namespace(call: Call) -> None:
    """With `force` the topics of the namespace are deleted first, each by itself. The namespace is
    deleted only if no topic is left."""
    if call.is_on("force"):
        await call.namespaces.check(call.namespace)
        admin = TopicAdmin(call.client)
        names = [info.name.full for info in await call.client.topics.in_namespace(call.namespace)]

        async def delete(name: str) -> None:
            with suppress(errors.TopicNotFound):
                await admin.delete(name)

        await call_each(delete, names)
    await call.namespaces.delete(call.namespace)


async def topics_of_namespace(call: Call) -> Any:
    topics = await call.broker.catalog.names_in(call.namespace)
    return [] if call.request.query.get("mode") == "NON_PERSISTENT" else topics


async def set_deduplication(call: Call) -> None:
    await _set_policies(call, {"deduplication": checked_bool(call.json())})


async def unset_deduplication(call: Call) -> None:
    await _set_policies(call, {"deduplication": INHERIT})


async def backlog_quotas(call: Call) -> Any:
    return quotas(await _policies(call))


async def set_backlog_quota(call: Call) -> None:
    kind = call.request.query.get("backlogQuotaType") or STORAGE
    topics = (await _policies(call)).topics
    await _set_policies(call, backlog_quota(kind, call.json(), topics))


async def unset_backlog_quota(call: Call) -> None:
    kind = call.request.query.get("backlogQuotaType") or STORAGE
    if kind not in QUOTAS:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"there is no backlogQuotaType '{kind}'")
    await _set_policies(call, {QUOTAS[kind]: INHERIT})


async def message_ttl_of(call: Call) -> HttpResponse:
    return HttpResponse(ttl_of(await _policies(call)))


async def set_message_ttl(call: Call) -> None:
    await _set_policies(call, message_ttl(call.json()))


async def unset_message_ttl(call: Call) -> None:
    await _set_policies(call, {"message_ttl_ms": INHERIT})


async def auto_topic_creation(call: Call) -> HttpResponse:
    return HttpResponse(auto_creation_of(await _policies(call)))


async def set_auto_topic_creation(call: Call) -> None:
    await _set_policies(call, auto_creation(call.json()))


async def unset_auto_topic_creation(call: Call) -> None:
    await _set_policies(call, dict.fromkeys(NAMESPACE_NAMES, INHERIT))


async def schema_strategy(call: Call) -> HttpResponse:
    return HttpResponse(schema_strategy_of(await _policies(call)))


async def set_schema_strategy(call: Call) -> None:
    await _set_policies(call, {SCHEMA_STRATEGY: schema_strategy_named(call.json())})


async def schema_validation(call: Call) -> HttpResponse:
    return HttpResponse((await _policies(call)).topics.get(SCHEMA_VALIDATION, False))


async def set_schema_validation(call: Call) -> None:
    await _set_policies(call, {SCHEMA_VALIDATION: checked_bool(call.json())})


async def schema_auto_update(call: Call) -> HttpResponse:
    return HttpResponse((await _policies(call)).topics.get(SCHEMA_AUTO_UPDATE, True))


async def set_schema_auto_update(call: Call) -> None:
    await _set_policies(call, {SCHEMA_AUTO_UPDATE: checked_bool(call.json())})


async def _policies(call: Call) -> NamespacePolicies:
    await call.namespaces.check(call.namespace)
    return await call.client.topics.namespace(call.namespace) or NamespacePolicies()


async def _set_policies(call: Call, changes: dict[str, Any]) -> None:
    await call.namespaces.check(call.namespace)
    await call.client.topics.set_namespace(call.namespace, changes)
