"""Verbs on brokers.

Always true: a broker is named by its address for HTTP, as Pulsar names it. Brokers are equal: the
one that clients take for the leader is the first by id, and does no more than the others. Nothing
of a broker can be set while it runs.
"""

from http import HTTPStatus
from typing import Any

from spark_ledger import __version__
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import WHOLE_NAMESPACE, Call
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.http import HttpResponse


def text(plain: str) -> HttpResponse:
    return HttpResponse(plain.encode(), media="text/plain")


async def health(call: Call) -> HttpResponse:
    """The response shows that this broker takes requests."""
    return text("ok")


async def status(call: Call) -> HttpResponse:
    """For load balancers: this broker takes requests."""
    return text("OK")


async def version(call: Call) -> HttpResponse:
    return text(__version__)


async def active(call: Call) -> Any:
    return sorted(await _ids(call))


async def leader(call: Call) -> Any:
    ids = await _ids(call)
    first = min(ids, key=lambda address: ids[address])
    return {"serviceUrl": f"http://{first}", "brokerId": first}


async def _ids(call: Call) -> dict[str, str]:
    """The ids of the live brokers by their addresses for HTTP."""
    registered = await brokers_alive(call.client.store)
    return {
        broker.admin_url.partition("://")[2]: id_
        for id_, broker in registered.items()
        if broker.admin_url
    }


async def owned_namespaces(call: Call) -> Any:
    """The namespaces of which this broker has partitions."""
    address, ids = call.request.parts["address"], await _ids(call)
    if address not in ids:
        raise HttpRefusal(HTTPStatus.NOT_FOUND, f"there is no broker at {address[:100]}")
    if ids[address] != call.broker.id:
        raise HttpRefusal(
            HTTPStatus.TEMPORARY_REDIRECT,
            f"the broker at {address} answers",
            f"http://{address}{call.request.path}",
        )
    names = {topic.info.name for topic in call.broker.open_topics() if topic.partitions}
    shared = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
    spaces = sorted({f"{name.tenant}/{name.namespace}" for name in names})
    return {f"{space}/{WHOLE_NAMESPACE}": shared for space in spaces}


async def settings(call: Call) -> Any:
    """The settings with which this broker runs."""
    plain = call.broker.settings.model_dump(mode="json")
    return {name: "" if value is None else str(value) for name, value in sorted(plain.items())}


async def dynamic_settings(call: Call) -> Any:
    return []


async def dynamic_values(call: Call) -> Any:
    return {}


async def set_dynamic(call: Call) -> Any:
    raise HttpRefusal(
        HTTPStatus.PRECONDITION_FAILED,
        f"Can't update non-dynamic configuration: {call.request.parts['name']} is set in the"
        " broker's file of settings, and counts from the broker's next start on",
    )


async def stores(call: Call) -> Any:
    """Where the metadata is."""
    url = call.broker.settings.service_url
    return {"metadataStoreUrl": url, "configurationMetadataStoreUrl": url, "ledgersRootPath": "/"}
