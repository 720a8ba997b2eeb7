"""Verbs on the policies of namespaces and topics: one function shows, sets or unsets any policy.

Always true: the namespace, or the topic, exists before a policy of it is shown or changed. A policy
that is set on a topic counts before the same policy of its namespace.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from spark_ledger import errors
from spark_ledger.broker.admin import policies
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.admin.policies import (
    NOT_IMPLEMENTED,
    NOT_IMPLEMENTED_OF_NAMESPACES,
    NOT_IMPLEMENTED_OF_TOPICS,
    POLICIES,
    STORAGE,
)
from spark_ledger.broker.admin.policy_shapes import (
    PulsarPolicy,
    Values,
    checked_object,
    refused,
    wrong_shape,
)
from spark_ledger.http import BODY_BYTES_MAX
from spark_ledger.topic.log.policies import (
    ACKNOWLEDGED,
    INHERIT,
    NAMESPACE_NAMES,
    NamespacePolicies,
)
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import TopicAdmin

Verb = Callable[[Call], Awaitable[Any]]
"""A verb returns a response, or the JSON of a response; None: a response without content."""


class RouteEntry(NamedTuple):
    method: str
    path: str
    verb: Verb
    body_bytes_max: int = BODY_BYTES_MAX


class Level(Protocol):
    """Where policies are set: on a namespace, or on a topic."""

    async def values(self, call: Call) -> Values:
        """The policies that are set there. Raises errors.NamespaceNotFound,
        errors.TopicNotFound."""

    async def present(self, call: Call) -> Values:
        """The policies that count there."""

    async def change(self, call: Call, changes: Values) -> None:
        """Raises HttpRefusal, errors of the topic layer."""

    async def change_by(self, call: Call, changes_of: Callable[[Values, Values], Values]) -> None:
        """As `change`; `changes_of` makes the changes of the policies that count there when they
        are written, and of those that are set there."""

    def shown(self, policy: PulsarPolicy, values: Values) -> Any:
        """The JSON for the policy."""


async def _check_namespace(call: Call) -> None:
    """Raises HttpRefusal in Pulsar's words: programs compare them."""
    try:
        await call.namespaces.check(call.namespace)
    except errors.NamespaceNotFound as error:
        has_tenant = call.tenant in await call.namespaces.tenants()
        what = "Namespace" if has_tenant else "Tenant"
        raise refused(HTTPStatus.NOT_FOUND, f"{what} does not exist") from error


class _Namespaces:
    async def values(self, call: Call) -> Values:
        await _check_namespace(call)
        stored = await call.client.topics.namespace(call.namespace) or NamespacePolicies()
        return self._values_of(stored)

    present = values

    def _values_of(self, stored: NamespacePolicies) -> Values:
        own = {name: getattr(stored, name) for name in NAMESPACE_NAMES}
        return {
            **stored.topics,
            **{name: value for name, value in own.items() if value is not None},
        }

    async def change(self, call: Call, changes: Values) -> None:
        await _check_namespace(call)
        if changes.get("retention") == ACKNOWLEDGED:
            raise refused(
                HTTPStatus.NOT_IMPLEMENTED,
                "topics that exist keep their retention=acknowledged or not: set 0 minutes and 0 MB"
                " on each topic, or when the namespace is made",
            )
        with enough_bookies():
            await TopicAdmin(call.client).set_namespace(call.namespace, changes)

    async def change_by(self, call: Call, changes_of: Callable[[Values, Values], Values]) -> None:
        await _check_namespace(call)

        def changes(stored: NamespacePolicies) -> Values:
            values = self._values_of(stored)
            return changes_of(values, values)

        await call.client.topics.change_namespace(call.namespace, changes)

    def shown(self, policy: PulsarPolicy, values: Values) -> Any:
        return policy.of_namespace(values)


class _Topics:
    async def values(self, call: Call) -> Values:
        return await call.client.topics.own_policies(await _topic(call))

    async def present(self, call: Call) -> Values:
        values = asdict((await _topic(call)).policies)
        for name in ("consumer_unacked_max", "subscription_unacked_max"):
            if values[name] is None:
                values[name] = getattr(call.broker.settings, name)
        return values

    async def change(self, call: Call, changes: Values) -> None:
        name, most = (await _topic(call)).name.full, call.broker.message_bytes_max
        size = changes.get("message_bytes_max")
        if isinstance(size, int) and size > most:
            raise refused(
                HTTPStatus.PRECONDITION_FAILED,
                f"maxMessageSize of a topic must be {most} or less, as of the broker, not {size}",
            )
        if changes.get("retention") == INHERIT:  # a topic always has a retention of its own
            retention = (await call.client.topics.inherited_policies(name)).retention
            changes = {**changes, "retention": retention}
        with enough_bookies():
            await TopicAdmin(call.client).change_policies(name, changes)

    async def change_by(self, call: Call, changes_of: Callable[[Values, Values], Values]) -> None:
        name = (await _topic(call)).name.full
        await call.client.topics.change_policies(name, changes_of)

    def shown(self, policy: PulsarPolicy, values: Values) -> Any:
        return policy.show(values)


@contextmanager
def enough_bookies() -> Iterator[None]:
    """An ensemble of more bookies than the cluster has is a bad value: the status is Pulsar's."""
    try:
        yield
    except errors.NotEnoughBookies as error:
        raise refused(HTTPStatus.PRECONDITION_FAILED, str(error)) from error


async def _topic(call: Call) -> TopicInfo:
    """Raises HttpRefusal, errors.TopicNotFound."""
    if call.is_on("isGlobal"):
        raise refused(
            HTTPStatus.NOT_IMPLEMENTED, "there is one cluster: leave isGlobal out, or false"
        )
    return await call.existing_topic()


NAMESPACES: Level = _Namespaces()
TOPICS: Level = _Topics()


async def _values(level: Level, call: Call) -> Values:
    """With the flag `applied`, the policies that count; otherwise those that are set."""
    return await (level.present(call) if call.is_on("applied") else level.values(call))


async def _show(level: Level, policy: PulsarPolicy, call: Call) -> Any:
    return level.shown(policy, await _values(level, call))


async def _set(level: Level, policy: PulsarPolicy, call: Call) -> None:
    await level.values(call)  # raises if the namespace or the topic is not there
    plain = call.json()
    if plain is None and policy.namespace in call.request.query:  # the TTL of a topic
        plain = _number_of(call.request.query[policy.namespace])
    await level.change(call, policy.take(plain))


def _number_of(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise wrong_shape(f"a whole number is needed, not {text!r}"[:200]) from None


async def _unset(level: Level, policy: PulsarPolicy, call: Call) -> None:
    await level.change(call, dict.fromkeys(policy.ours, INHERIT))


async def _quotas(level: Level, call: Call) -> Any:
    return policies.quotas(await _values(level, call))


async def _set_quota(level: Level, call: Call) -> None:
    kind = call.request.query.get("backlogQuotaType") or STORAGE
    await level.change_by(
        call, lambda present, _: policies.backlog_quota(kind, call.json(), present)
    )


async def _unset_quota(level: Level, call: Call) -> None:
    kind = call.request.query.get("backlogQuotaType") or STORAGE
    await level.change_by(call, lambda _, own: policies.no_backlog_quota(kind, own))


async def _not_set(level: Level, unset: Any, call: Call) -> Any:
    """Show a policy that cannot be set here, or unset it."""
    await level.values(call)
    return unset if call.request.method == "GET" else None


_VERBS: dict[str, Callable[[Level, PulsarPolicy, Call], Awaitable[Any]]] = {
    "GET": _show,
    "POST": _set,
    "PUT": _set,
    "DELETE": _unset,
}


@dataclass(frozen=True, slots=True)
class _LevelRoutes:
    """The routes of one level, below the path `root`."""

    root: str
    level: Level

    def of_policy(
        self, policy: PulsarPolicy, path: str, verbs: tuple[str, ...]
    ) -> Iterator[RouteEntry]:
        for method in verbs if path else ():
            yield RouteEntry(
                method, f"{self.root}/{path}", partial(_VERBS[method], self.level, policy)
            )

    def of_quotas_and_not_implemented(self, not_implemented: Values) -> Iterator[RouteEntry]:
        yield RouteEntry("GET", f"{self.root}/backlogQuotaMap", partial(_quotas, self.level))
        yield RouteEntry("POST", f"{self.root}/backlogQuota", partial(_set_quota, self.level))
        yield RouteEntry("DELETE", f"{self.root}/backlogQuota", partial(_unset_quota, self.level))
        for name, unset in {**NOT_IMPLEMENTED, **not_implemented}.items():
            for method in ("GET", "DELETE"):
                yield RouteEntry(
                    method, f"{self.root}/{name}", partial(_not_set, self.level, unset)
                )


def of_namespaces(root: str) -> Iterator[RouteEntry]:
    """The routes of the policies of namespaces; `root` is the path of a namespace."""
    routes = _LevelRoutes(root, NAMESPACES)
    for policy in POLICIES:
        yield from routes.of_policy(policy, policy.namespace, policy.verbs)
    yield from routes.of_quotas_and_not_implemented(NOT_IMPLEMENTED_OF_NAMESPACES)


def of_topics(root: str) -> Iterator[RouteEntry]:
    """The routes of the policies of topics; `root` is the path of a topic."""
    routes = _LevelRoutes(root, TOPICS)
    for policy in POLICIES:
        verbs = tuple(dict.fromkeys((*policy.verbs, "DELETE")))
        yield from routes.of_policy(policy, policy.topic, verbs)
    yield from routes.of_quotas_and_not_implemented(NOT_IMPLEMENTED_OF_TOPICS)


async def all_policies(call: Call) -> Any:
    """The object of all policies of the namespace."""
    return policies.to_pulsar(await NAMESPACES.values(call), call.cluster)


# -- properties and clusters of a namespace --------------------------------------------------------


async def properties(call: Call) -> Any:
    return (await NAMESPACES.values(call)).get("properties") or {}


async def put_properties(call: Call) -> None:
    """Add the given properties to the present properties."""
    given = checked_object(call.json())
    if not all(isinstance(value, str) for value in given.values()):
        raise wrong_shape("properties are texts by their names")
    await _change_properties(call, lambda present: present | given)


async def _change_properties(
    call: Call, changed: Callable[[dict[str, str]], dict[str, str]]
) -> dict[str, str]:
    """Change the properties as they are when they are written, so that no change of another caller
    is lost; returns the properties before."""
    before: dict[str, str] = {}

    def changes_of(present: NamespacePolicies) -> Values:
        nonlocal before
        before = dict(present.properties or {})
        return {"properties": changed(before)}

    await call.namespaces.check(call.namespace)
    await call.client.topics.change_namespace(call.namespace, changes_of)
    return before


async def delete_properties(call: Call) -> None:
    await NAMESPACES.change(call, {"properties": INHERIT})


async def show_property(call: Call) -> Any:
    return (await properties(call)).get(call.request.parts["key"])


async def put_property(call: Call) -> None:
    added = {call.request.parts["key"]: call.request.parts["value"]}
    await _change_properties(call, lambda present: present | added)


async def delete_property(call: Call) -> Any:
    key = call.request.parts["key"]
    before = await _change_properties(
        call, lambda present: {name: value for name, value in present.items() if name != key}
    )
    return before.get(key)


async def replication(call: Call) -> Any:
    await NAMESPACES.values(call)
    return [call.cluster]


async def set_replication(call: Call) -> None:
    await NAMESPACES.values(call)
    policies.check_clusters(call.json(), call.cluster)


async def permissions_of_namespace(call: Call) -> Any:
    """As long as there are no rights, no role has a grant, and every client may do everything."""
    await NAMESPACES.values(call)
    return {}


async def permissions_of_topic(call: Call) -> Any:
    await TOPICS.values(call)
    return {}
