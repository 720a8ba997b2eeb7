"""The broker's routes by HTTP: lookups, for clients whose service URL begins with http://, and the
verbs of the admin API that are implemented.

Always true: the response to a refused request has the status by which Pulsar's clients recognise
the error, and the reason in words. A verb gets only requests that access.py admits. A GET changes
nothing. Exception: some GETs create a missing topic, if clients may create topics. A request that
is not in ROUTES gets 501 below /admin, and 404 elsewhere.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from spark_ledger.broker.admin import (
    brokers,
    messages,
    namespaces,
    non_persistent,
    policy_verbs,
    schemas,
    stats,
    subscriptions,
    topics,
)
from spark_ledger.broker.admin.access import Access, HttpRefusal
from spark_ledger.broker.admin.call import Call, not_implemented
from spark_ledger.broker.admin.policy_verbs import RouteEntry, Verb
from spark_ledger.broker.admin.refusals import TEXT_MAX, refusal_of
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.broker.names import parse_for_lookup
from spark_ledger.broker.serve.commands import check_no_listener
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.http import HttpRequest, HttpResponse, Route
from spark_ledger.topic.acks.asking import ACKNOWLEDGED_PATH

_log = logging.getLogger(__name__)


_LISTENER = "x-pulsar-listenername"


async def _lookup(call: Call) -> Any:
    listener = call.request.query.get("listenerName") or call.request.headers.get(_LISTENER, "")
    check_no_listener(listener)
    name = parse_for_lookup("{domain}://{tenant}/{namespace}/{topic}".format(**call.request.parts))
    url, _is_here = await call.broker.lookup(name, authoritative=False)
    registered = await brokers_alive(call.client.store)
    admin_url = next((broker.admin_url for broker in registered.values() if broker.url == url), "")
    tls = dict.fromkeys(("brokerUrlTls", "brokerUrlSsl", "httpUrlTls"), "")
    return {"brokerUrl": url, "nativeUrl": url, "httpUrl": admin_url, **tls}


async def _not_implemented(call: Call) -> Any:
    raise not_implemented(call.request)


_ADMIN, _V2 = "/admin", "/admin/v2"
_BROKERS = f"{_V2}/brokers"
_TENANT = f"{_V2}/tenants/{{tenant}}"
_NAMESPACE = f"{_V2}/namespaces/{{tenant}}/{{namespace}}"
_TOPICS = f"{_V2}/persistent/{{tenant}}/{{namespace}}"
_TOPIC = f"{_TOPICS}/{{topic}}"
_NON_PERSISTENT = f"{_V2}/non-persistent/{{tenant}}/{{namespace}}"
_SCHEMAS = f"{_V2}/schemas/{{tenant}}/{{namespace}}/{{topic}}"
_SUBSCRIPTION = f"{_TOPIC}/subscription/{{subscription}}"
_LOOKUP = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"

ROUTES = (
    RouteEntry("GET", "/status.html", brokers.status),
    RouteEntry("GET", _LOOKUP, _lookup),
    RouteEntry("GET", f"{_LOOKUP}/bundle", topics.bundle_of_topic),
    RouteEntry("GET", f"{ACKNOWLEDGED_PATH}/{{topic_id}}", subscriptions.acknowledged),
    RouteEntry("GET", f"{_V2}/clusters", namespaces.clusters),
    RouteEntry("GET", f"{_V2}/clusters/{{cluster}}", namespaces.cluster),
    RouteEntry("GET", f"{_BROKERS}/health", brokers.health),
    RouteEntry("GET", f"{_BROKERS}/ready", brokers.health),
    RouteEntry("GET", f"{_BROKERS}/version", brokers.version),
    RouteEntry("GET", f"{_BROKERS}/leaderBroker", brokers.leader),
    RouteEntry("GET", f"{_BROKERS}/configuration", brokers.dynamic_settings),
    RouteEntry("GET", f"{_BROKERS}/configuration/runtime", brokers.settings),
    RouteEntry("GET", f"{_BROKERS}/configuration/values", brokers.dynamic_values),
    RouteEntry("POST", f"{_BROKERS}/configuration/{{name}}/{{value}}", brokers.set_dynamic),
    RouteEntry("DELETE", f"{_BROKERS}/configuration/{{name}}", brokers.set_dynamic),
    RouteEntry("GET", f"{_BROKERS}/internal-configuration", brokers.stores),
    RouteEntry("GET", f"{_V2}/broker-stats/topics", stats.of_this_broker),
    RouteEntry("GET", _BROKERS, brokers.active),
    RouteEntry("GET", f"{_BROKERS}/{{cluster}}", brokers.active),
    RouteEntry(
        "GET", f"{_BROKERS}/{{cluster}}/{{address}}/ownedNamespaces", brokers.owned_namespaces
    ),
    RouteEntry("GET", f"{_V2}/tenants", namespaces.tenants),
    RouteEntry("GET", _TENANT, namespaces.tenant),
    RouteEntry("PUT", _TENANT, namespaces.create_tenant),
    RouteEntry("POST", _TENANT, namespaces.change_tenant),
    RouteEntry("DELETE", _TENANT, namespaces.delete_tenant),
    RouteEntry("GET", f"{_V2}/namespaces/{{tenant}}", namespaces.namespaces_of_tenant),
    RouteEntry("GET", _NAMESPACE, policy_verbs.all_policies),
    RouteEntry("PUT", _NAMESPACE, namespaces.create_namespace),
    RouteEntry("DELETE", _NAMESPACE, namespaces.delete_namespace),
    RouteEntry("GET", f"{_NAMESPACE}/topics", namespaces.topics_of_namespace),
    RouteEntry("GET", f"{_NAMESPACE}/bundles", topics.bundles),
    RouteEntry("PUT", f"{_NAMESPACE}/unload", topics.unload_namespace),
    RouteEntry("PUT", f"{_NAMESPACE}/{{bundle}}/unload", topics.unload_namespace),
    RouteEntry("POST", f"{_NAMESPACE}/clearBacklog", subscriptions.clear_backlogs),
    RouteEntry("POST", f"{_NAMESPACE}/clearBacklog/{{subscription}}", subscriptions.clear_backlogs),
    RouteEntry("POST", f"{_NAMESPACE}/unsubscribe/{{subscription}}", subscriptions.unsubscribe),
    RouteEntry("POST", f"{_NAMESPACE}/{{bundle}}/clearBacklog", subscriptions.clear_backlogs),
    RouteEntry(
        *("POST", f"{_NAMESPACE}/{{bundle}}/clearBacklog/{{subscription}}"),
        subscriptions.clear_backlogs,
    ),
    RouteEntry(
        "POST", f"{_NAMESPACE}/{{bundle}}/unsubscribe/{{subscription}}", subscriptions.unsubscribe
    ),
    *policy_verbs.of_namespaces(_NAMESPACE),
    RouteEntry("GET", f"{_NAMESPACE}/replication", policy_verbs.replication),
    RouteEntry("POST", f"{_NAMESPACE}/replication", policy_verbs.set_replication),
    RouteEntry("GET", f"{_NAMESPACE}/permissions", policy_verbs.permissions_of_namespace),
    RouteEntry(
        "GET", f"{_NAMESPACE}/permissions/subscription", policy_verbs.permissions_of_namespace
    ),
    RouteEntry("GET", f"{_NAMESPACE}/properties", policy_verbs.properties),
    RouteEntry("PUT", f"{_NAMESPACE}/properties", policy_verbs.put_properties),
    RouteEntry("DELETE", f"{_NAMESPACE}/properties", policy_verbs.delete_properties),
    RouteEntry("GET", f"{_NAMESPACE}/property/{{key}}", policy_verbs.show_property),
    RouteEntry("DELETE", f"{_NAMESPACE}/property/{{key}}", policy_verbs.delete_property),
    RouteEntry("PUT", f"{_NAMESPACE}/property/{{key}}/{{value}}", policy_verbs.put_property),
    RouteEntry("GET", f"{_SCHEMAS}/schema", schemas.latest),
    RouteEntry("GET", f"{_SCHEMAS}/schema/{{version}}", schemas.version),
    RouteEntry("GET", f"{_SCHEMAS}/schemas", schemas.versions),
    RouteEntry("POST", f"{_SCHEMAS}/schema", schemas.register, schemas.BODY_BYTES_MAX),
    RouteEntry("DELETE", f"{_SCHEMAS}/schema", schemas.delete),
    RouteEntry("POST", f"{_SCHEMAS}/compatibility", schemas.compatibility, schemas.BODY_BYTES_MAX),
    RouteEntry("POST", f"{_SCHEMAS}/version", schemas.version_of, schemas.BODY_BYTES_MAX),
    RouteEntry("GET", _TOPICS, topics.topics),
    RouteEntry("GET", f"{_TOPICS}/partitioned", topics.partitioned_topics),
    RouteEntry("PUT", _TOPIC, topics.create_topic),
    RouteEntry("DELETE", _TOPIC, topics.delete_topic),
    RouteEntry("GET", f"{_TOPIC}/partitions", topics.partitions),
    RouteEntry("PUT", f"{_TOPIC}/partitions", topics.create_partitioned),
    RouteEntry("POST", f"{_TOPIC}/partitions", topics.grow),
    RouteEntry("DELETE", f"{_TOPIC}/partitions", topics.delete_partitioned),
    RouteEntry("POST", f"{_TOPIC}/createMissedPartitions", topics.create_missed),
    RouteEntry("GET", f"{_TOPIC}/properties", topics.properties),
    RouteEntry("PUT", f"{_TOPIC}/properties", topics.set_properties),
    RouteEntry("DELETE", f"{_TOPIC}/properties", topics.remove_property),
    RouteEntry("POST", f"{_TOPIC}/terminate", topics.terminate),
    RouteEntry("POST", f"{_TOPIC}/terminate/partitions", topics.terminate_partitioned),
    RouteEntry("PUT", f"{_TOPIC}/unload", topics.unload),
    RouteEntry("GET", f"{_TOPIC}/compaction", _not_implemented),
    RouteEntry("PUT", f"{_TOPIC}/compaction", _not_implemented),
    RouteEntry("GET", f"{_TOPIC}/ledger/{{ledger}}/entry/{{entry}}", messages.message),
    RouteEntry("GET", f"{_TOPIC}/examinemessage", messages.examine),
    RouteEntry("GET", f"{_TOPIC}/messageid/{{ms}}", messages.id_since),
    RouteEntry("GET", f"{_TOPIC}/lastMessageId", messages.last_id),
    RouteEntry("PUT", f"{_TOPIC}/backlogSize", subscriptions.backlog_size),
    RouteEntry("GET", f"{_TOPIC}/stats", stats.topic_stats),
    RouteEntry("GET", f"{_TOPIC}/partitioned-stats", stats.partitioned_stats),
    RouteEntry("GET", f"{_TOPIC}/internalStats", stats.internal),
    RouteEntry("GET", f"{_TOPIC}/partitioned-internalStats", stats.partitioned_internal),
    RouteEntry("GET", f"{_TOPIC}/internal-info", stats.internal_info_of),
    *policy_verbs.of_topics(_TOPIC),
    RouteEntry("GET", f"{_TOPIC}/permissions", policy_verbs.permissions_of_topic),
    RouteEntry("GET", f"{_TOPIC}/subscriptions", subscriptions.subscriptions),
    RouteEntry("PUT", _SUBSCRIPTION, subscriptions.create_subscription),
    RouteEntry("DELETE", _SUBSCRIPTION, subscriptions.delete_subscription),
    RouteEntry("GET", f"{_SUBSCRIPTION}/properties", subscriptions.properties),
    RouteEntry("PUT", f"{_SUBSCRIPTION}/properties", subscriptions.set_properties),
    RouteEntry("GET", f"{_SUBSCRIPTION}/position/{{position}}", messages.peek),
    RouteEntry("POST", f"{_SUBSCRIPTION}/skip_all", subscriptions.skip_all),
    RouteEntry("POST", f"{_SUBSCRIPTION}/skip/{{count}}", subscriptions.skip),
    RouteEntry("POST", f"{_SUBSCRIPTION}/expireMessages", subscriptions.expire_to_message),
    RouteEntry("POST", f"{_SUBSCRIPTION}/expireMessages/{{seconds}}", subscriptions.expire),
    RouteEntry(
        "POST", f"{_TOPIC}/all_subscription/expireMessages/{{seconds}}", subscriptions.expire_all
    ),
    RouteEntry("POST", f"{_SUBSCRIPTION}/resetcursor", subscriptions.reset_to_message),
    RouteEntry("POST", f"{_SUBSCRIPTION}/resetcursor/{{ms}}", subscriptions.reset_to_time),
    RouteEntry("GET", _NON_PERSISTENT, non_persistent.names_in),
    RouteEntry("GET", f"{_NON_PERSISTENT}/partitioned", non_persistent.partitioned_topics),
    RouteEntry("PUT", f"{_NON_PERSISTENT}/{{topic}}", non_persistent.create_topic),
    RouteEntry("DELETE", f"{_NON_PERSISTENT}/{{topic}}", non_persistent.delete_topic),
    RouteEntry("GET", f"{_NON_PERSISTENT}/{{topic}}/partitions", non_persistent.partitions),
    RouteEntry("PUT", f"{_NON_PERSISTENT}/{{topic}}/partitions", non_persistent.create_partitioned),
    RouteEntry("POST", f"{_NON_PERSISTENT}/{{topic}}/partitions", non_persistent.grow),
    RouteEntry(
        "DELETE", f"{_NON_PERSISTENT}/{{topic}}/partitions", non_persistent.delete_partitioned
    ),
    RouteEntry("PUT", f"{_NON_PERSISTENT}/{{topic}}/unload", non_persistent.unload),
    RouteEntry("GET", f"{_NON_PERSISTENT}/{{topic}}/subscriptions", non_persistent.subscriptions),
    RouteEntry(
        "DELETE",
        f"{_NON_PERSISTENT}/{{topic}}/subscription/{{subscription}}",
        non_persistent.delete_subscription,
    ),
    RouteEntry("GET", f"{_NON_PERSISTENT}/{{topic}}/stats", non_persistent.topic_stats),
    RouteEntry(
        "GET", f"{_NON_PERSISTENT}/{{topic}}/partitioned-stats", non_persistent.partitioned_stats
    ),
)
"""Every request that docs/pulsar.md lists, also those that it lists with 501."""


async def _not_found(call: Call) -> Any:
    raise HttpRefusal(HTTPStatus.NOT_FOUND, f"there is nothing at {call.request.path}")


def routes(broker: Callable[[], Broker], settings: BrokerSettings) -> list[Route]:
    """`broker` returns the broker. It is called only when a request comes: a process makes its
    routes, and reserves its port, before it makes its broker (server.py)."""
    access = access_of(settings)

    def route(method: str, path: str, verb: Verb, body_bytes_max: int) -> Route:
        async def handle(request: HttpRequest) -> HttpResponse:
            try:
                access.check(request, changes=request.method != "GET")
                result = await verb(Call(broker(), request))
            except Exception as error:
                return _response_to(error)
            if isinstance(result, HttpResponse):
                return result
            if result is None:
                return HttpResponse(status=HTTPStatus.NO_CONTENT)
            return HttpResponse(result)

        return Route(method, path, handle, body_bytes_max)

    rest: Sequence[RouteEntry] = (
        RouteEntry("*", f"{_ADMIN}/{{rest:.*}}", _not_implemented),
        RouteEntry("*", "/{rest:.*}", _not_found),
    )
    return [route(*entry) for entry in (*ROUTES, *rest)]


def access_of(settings: BrokerSettings) -> Access:
    """The rules that admit requests to a broker with these settings."""
    own_names = (settings.host, settings.advertised_host, socket.gethostname())
    further_names = (name.strip() for name in settings.admin_hosts.split(","))
    names = (*own_names, *further_names)
    hosts = frozenset(name.strip("[]").lower() for name in names if name)
    return Access(hosts, settings.admin_open)


def _response_to(error: Exception) -> HttpResponse:
    refusal = refusal_of(error)
    if refusal is not None:
        return HttpResponse({"reason": refusal.reason}, refusal.status, refusal.headers)
    _log.error("a request by HTTP has failed", exc_info=error)
    reason = f"a defect of the broker: {error!r}"[:TEXT_MAX]
    return HttpResponse({"reason": reason}, HTTPStatus.INTERNAL_SERVER_ERROR)
