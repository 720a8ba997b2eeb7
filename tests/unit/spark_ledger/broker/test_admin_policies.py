"""Each policy of the admin API, set by HTTP on a namespace and on a topic of a simulated cluster:
each row of the table, what it stores, what it shows, what it refuses."""

import asyncio

import pytest

from spark_ledger.broker.admin.policies import (
    NOT_IMPLEMENTED,
    NOT_IMPLEMENTED_OF_NAMESPACES,
    NOT_IMPLEMENTED_OF_TOPICS,
    POLICIES,
)
from spark_ledger.topic.log.policies import PROPERTIES_BYTES_MAX, TopicPolicies
from tests.unit.spark_ledger.broker.admin_requests import at_a_broker

N = "/admin/v2/namespaces/public/default"
T = "/admin/v2/persistent/public/default/t"


def retention(minutes, megabytes):
    return {"retentionTimeInMinutes": minutes, "retentionSizeInMB": megabytes}


def persistence(*quorums, rate=0.0):
    names = ("bookkeeperEnsemble", "bookkeeperWriteQuorum", "bookkeeperAckQuorum")
    return {**dict(zip(names, quorums, strict=True)), "managedLedgerMaxMarkDeleteRate": rate}


def creation(allows, kind="non-partitioned", partitions=None):
    return {
        "allowAutoTopicCreation": allows,
        "topicType": kind,
        "defaultNumPartitions": partitions,
    }


def delays(active, longest_ms):
    names = ("maxDeliveryDelayInMillis", "maxDelayInMillis")
    return {"active": active, "tickTime": 1000, **dict.fromkeys(names, longest_ms)}


def published(messages, size):
    return {"publishThrottlingRateInMsg": messages, "publishThrottlingRateInByte": size}


def dispatched(messages, size, seconds=1, *, relative=False):
    return {
        "dispatchThrottlingRateInMsg": messages,
        "dispatchThrottlingRateInByte": size,
        "ratePeriodInSecond": seconds,
        "relativeToPublishRate": relative,
    }


def subscribes(count, seconds):
    return {"subscribeThrottlingRatePerConsumer": count, "ratePeriodInSecond": seconds}


SUBSCRIPTIONS = "allowAutoSubscriptionCreation"
NOT_WHOLE = [("x", 400), (1.5, 400), (True, 400), (None, 400), ([], 400), (2**31, 400), (-1, 412)]
LIMIT = [(7, 7), (0, None)]
BYTES_MAX = 4 << 10
"""Of a message, by the broker's settings."""
DISPATCH = (
    [
        (dispatched(5, 7), "5 messages, 7 bytes"),
        (dispatched(-1, 7, 30, relative=True), "7 bytes, 30 s, relative"),
        (dispatched(-1, -1), None),
    ],
    [
        (dispatched(5, 7, 0), 412),
        (dispatched(5, 7, "1"), 400),
        (dispatched(5, 7, relative="x"), 400),
        (dispatched(5.5, 7), 400),
        (5, 400),
    ],
)
CASES = {
    "deduplication": ([(True, True), (False, False)], [("yes", 400), (1, 400), (None, 400)]),
    "messageTTL": (
        [(60, 60_000), (0, None)],
        [*((bad, 412) for bad in (-1, 2**31)), *((bad, 400) for bad in ("x", True, 1.5, None))],
    ),
    "retention": (
        [
            (retention(60, 1024), ("limits", 3_600_000, 1 << 30)),
            (retention(-1, 1), ("limits", None, 1 << 20)),
            (retention(1, -1), ("limits", 60_000, None)),
            (retention(-1, -1), ("limits", None, None)),
        ],
        [
            (retention(0, 5), 412),
            (retention(5, 0), 412),
            (retention(-2, 5), 412),
            (retention(5, -2), 412),
            (retention(5, 1.5), 412),
            (retention("5", 5), 400),
            (retention(5, 2**60), 412),
            ({}, 400),
            (5, 400),
        ],
    ),
    "persistence": (
        [(persistence(2, 2, 1), (2, 2, 1)), (persistence(1, 1, 1, rate=10.0), (1, 1, 1))],
        [
            (persistence(1, 2, 2), 412),
            (persistence(5, 2, 2), 412),  # there are four bookies
            (persistence(2, 2, 0), 412),
            (persistence(2, 2, 2, rate=-1), 412),
            (persistence(2, 2, 2, rate=0.5), 501),
            (persistence(2, 2, 2, rate="x"), 400),
            (persistence(2, 2, "2"), 400),
            ({}, 400),
            ([], 400),
        ],
    ),
    "autoTopicCreation": (
        [(creation(False), (False, 0)), (creation(True, "partitioned", 3), (True, 3))],
        [
            ({"topicType": "x"}, 400),
            ([], 400),
            (creation(True, "partitioned", 0), 406),
            (creation(True, "partitioned"), 406),
            (creation(True, "partitioned", "3"), 406),
            (creation(True, "partitioned", 10**6), 406),
            (creation(True, partitions=3), 406),
            (creation(True, "both"), 406),
        ],
    ),
    "autoSubscriptionCreation": (
        [({SUBSCRIPTIONS: False}, False), ({SUBSCRIPTIONS: True}, True)],
        [({}, 400), (True, 400), ({SUBSCRIPTIONS: "x"}, 400)],
    ),
    "schemaCompatibilityStrategy": (
        [("BACKWARD", "backward"), ("full_transitive", "full_transitive")],
        [("SIDEWARD", 400), (5, 400), (None, 400)],
    ),
    "schemaValidationEnforced": ([(True, True)], [("x", 400)]),
    "isAllowAutoUpdateSchema": ([(False, False)], [("x", 400)]),
    "maxProducersPerTopic": (LIMIT, NOT_WHOLE),
    "maxConsumersPerTopic": (LIMIT, NOT_WHOLE),
    "maxConsumersPerSubscription": (LIMIT, NOT_WHOLE),
    "maxSubscriptionsPerTopic": (LIMIT, NOT_WHOLE),
    "maxUnackedMessagesPerConsumer": ([(7, 7), (0, 0)], NOT_WHOLE),
    "maxUnackedMessagesPerSubscription": ([(7, 7), (0, 0)], NOT_WHOLE),
    "maxTopicsPerNamespace": (LIMIT, NOT_WHOLE),
    "subscriptionExpirationTime": ([(90, 90 * 60_000), (0, None)], NOT_WHOLE),
    "delayedDelivery": (
        [(delays(False, 5000), (False, 5000)), (delays(True, 0), (True, None))],
        [
            (5, 400),
            (delays("yes", 0), 400),
            (delays(True, -1), 400),
            (delays(True, 1.5), 400),
            (delays(True, 0) | {"tickTime": -1}, 400),
            (delays(True, 0) | {"tickTime": 99}, 501),
        ],
    ),
    "deduplicationSnapshotInterval": (
        [(1000, 1000), (100, 100), (0, None)],
        [*NOT_WHOLE, (99, 501)],
    ),
    "publishRate": (
        [
            (published(5, 7), "5 messages, 7 bytes"),
            (published(-1, 7), "7 bytes"),
            (published(-1, -1), None),
        ],
        [(published("5", 7), 400), (published(5, 2**63), 400), ([], 400)],
    ),
    "dispatchRate": DISPATCH,
    "subscriptionDispatchRate": DISPATCH,
    "subscribeRate": (
        [
            (subscribes(10, 60), "10 requests, 60 s"),
            (subscribes(-1, 30), None),
        ],
        [(subscribes(5, 0), 412), (subscribes(5, "x"), 400), (subscribes(None, 5), 400)],
    ),
    "maxMessageSize": (LIMIT, [*NOT_WHOLE, (BYTES_MAX + 1, 412)]),
}
"""By policy what is taken, with the values here, and what is refused, with the status."""


def as_shown(policy, plain):
    if policy.namespace == "persistence":  # the rate is not kept
        return plain | {"managedLedgerMaxMarkDeleteRate": 0.0}
    return plain.upper() if policy.namespace == "schemaCompatibilityStrategy" else plain


def with_unknown_fields(taken):
    """Objects that would be taken, each with a field that the policy does not have."""
    return [(plain | {"foo": 1}, 400) for plain, _ in taken if isinstance(plain, dict)]


def test_every_policy_of_the_table_has_a_case():
    assert list(CASES) == [policy.namespace or policy.topic for policy in POLICIES]


async def stored(broker, ours):
    """The values of the namespace's policies."""
    found = await broker.client.topics.namespace("public/default")
    values = [
        getattr(found, name) if hasattr(found, name) else found.topics.get(name) for name in ours
    ]
    return values[0] if len(ours) == 1 else tuple(values)


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES if policy.namespace], ids=lambda p: p.namespace
)
def test_a_policy_is_set_shown_and_unset_on_a_namespace(policy):
    taken, refused = CASES[policy.namespace]
    path, method = f"{N}/{policy.namespace}", "PUT" if "PUT" in policy.verbs else "POST"
    ours = ("retention", *policy.ours[:2]) if policy.namespace == "retention" else policy.ours
    gone = path.replace("default", "gone")

    async def act(ask, broker, stage):
        unset = (204, None) if policy.unset is None else (200, policy.unset)
        assert await ask("GET", path) == unset
        for plain, values in taken:
            assert await ask(method, path, plain) == (204, None)
            assert await stored(broker, ours) == values
            assert await ask("GET", path) == (200, as_shown(policy, plain))
            recorded = as_shown(policy, plain)
            recorded = {"standalone": recorded} if policy.by_cluster else recorded
            assert (await ask("GET", N))[1][policy.record] == recorded
        for plain, status in (*refused, *with_unknown_fields(taken)):
            answered, body = await ask(method, path, plain)
            assert (plain, answered) == (plain, status) and len(body["reason"]) > 10
        assert await stored(broker, ours) == values
        if "DELETE" in policy.verbs:
            assert await ask("DELETE", path) == (204, None)
            assert await ask("GET", path) == unset
        assert (await ask("GET", gone))[0] == 404
        for plain in (taken[0][0], refused[0][0]):
            assert (await ask(method, gone, plain))[0] == 404

    at_a_broker(act)


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES if policy.topic], ids=lambda policy: policy.topic
)
def test_a_policy_of_a_topic_counts_before_that_of_its_namespace(policy):
    taken, refused = CASES[policy.namespace or policy.topic]
    path, method = f"{T}/{policy.topic}", "PUT" if "PUT" in policy.verbs else "POST"
    whole = as_shown(policy, taken[-1][0])

    async def act(ask, broker, stage):
        broker.message_bytes_max = BYTES_MAX
        await stage.client.topics.delete("t")
        await stage.client.topics.create("t", policies={})
        assert await ask("GET", path) == (204, None)
        await broker.client.topics.set_namespace("public/default", policy.take(taken[-1][0]))
        assert await ask("GET", path) == (204, None)
        assert await ask("GET", f"{path}?applied=true") == (200, whole)
        plain, values = taken[0]
        assert await ask(method, path, plain) == (204, None)
        assert await ask("GET", path) == await ask("GET", f"{path}?applied=true")
        assert await ask("GET", path) == (200, as_shown(policy, plain))
        policies = (await broker.client.topics.open("t")).policies
        if isinstance(values, tuple) and policy.namespace != "retention":
            assert tuple(getattr(policies, name) for name in policy.ours) == values
        elif policy.namespace != "retention":
            assert getattr(policies, policy.ours[0]) == values
        for bad, status in refused:
            assert (await ask(method, path, bad))[0] == status
        for verb, body in ((method, plain), ("GET", None), ("DELETE", None)):
            for query in ("isGlobal=true", "isGlobal=true&applied=true"):
                assert (await ask(verb, f"{path}?{query}", body))[0] == 501
        assert await ask("GET", path) == (200, as_shown(policy, plain))
        assert await ask("DELETE", path) == (204, None)
        assert await ask("GET", path) == (204, None)
        assert await ask("GET", f"{path}?applied=true") == (200, whole)
        gone = path.replace("/t/", "/gone/")
        assert (await ask("GET", gone))[0] == (await ask(method, gone, plain))[0] == 404

    at_a_broker(act)


def test_without_policies_a_topic_shows_what_counts_by_default():
    async def act(ask, broker, stage):
        for policy, shown in (
            ("messageTTL", 0),
            ("retention", retention(-1, -1)),
            ("persistence", persistence(3, 3, 2)),
            ("maxProducers", 0),
            ("maxUnackedMessagesOnConsumer", 50_000),
            ("maxUnackedMessagesOnSubscription", 200_000),
            ("deduplicationEnabled", False),
            ("schemaCompatibilityStrategy", "FULL"),
            ("backlogQuotaMap", {}),
        ):
            await stage.client.topics.create(policy, policies={})
            path = f"{T[:-1]}{policy}/{policy}"
            assert await ask("GET", f"{path}?applied=true") == (200, shown)

    at_a_broker(act)


def test_the_time_to_live_of_a_topic_is_in_the_query_too():
    async def act(ask, broker, stage):
        assert await ask("POST", f"{T}/messageTTL?messageTTL=600") == (204, None)
        assert await ask("GET", f"{T}/messageTTL") == (200, 600)
        assert (await ask("POST", f"{T}/messageTTL?messageTTL=x"))[0] == 400
        assert (await ask("POST", f"{T}/messageTTL?messageTTL=-5"))[0] == 412
        assert (await ask("POST", f"{T}/messageTTL"))[0] == 400
        assert await ask("DELETE", f"{T}/messageTTL?messageTTL=0") == (204, None)

    at_a_broker(act)


def test_no_retention_is_of_a_topic_and_of_a_namespace_that_is_made():
    none = retention(0, 0)

    async def act(ask, broker, stage):
        status, body = await ask("POST", f"{N}/retention", none)
        assert status == 501 and "each topic" in body["reason"]
        assert await ask("POST", f"{T}/retention", retention(5, 5)) == (204, None)
        assert await ask("POST", f"{T}/retention", none) == (204, None)
        assert await ask("GET", f"{T}/retention") == (200, none)
        policies = (await broker.client.topics.open("t")).policies
        assert policies.trims and policies.retention == "acknowledged"
        assert await ask("DELETE", f"{T}/retention") == (204, None)
        assert not (await broker.client.topics.open("t")).policies.trims

        made = "/admin/v2/namespaces/public/made"
        assert await ask("PUT", made, {"retention_policies": none}) == (204, None)
        assert (await ask("GET", made))[1]["retention_policies"] == none
        await ask("PUT", "/admin/v2/persistent/public/made/x")
        assert (await broker.client.topics.open("public/made/x")).policies.trims

    at_a_broker(act)


def quota(limit, kind="Size", policy="producer_exception"):
    return {f"limit{kind}": limit, "policy": policy}


def test_quotas_of_a_topic_count_before_those_of_its_namespace():
    async def act(ask, broker, stage):
        await stage.client.topics.delete("t")
        await stage.client.topics.create("t", policies={})
        age = "backlogQuota?backlogQuotaType=message_age"
        assert await ask("POST", f"{N}/backlogQuota", quota(1000)) == (204, None)
        assert await ask("GET", f"{T}/backlogQuotaMap") == (200, {})
        _, counting = await ask("GET", f"{T}/backlogQuotaMap?applied=true")
        assert counting["destination_storage"]["limitSize"] == 1000
        held = quota(60, "Time", "producer_request_hold")
        assert (await ask("POST", f"{T}/{age}", held))[0] == 501  # the namespace's is the other one
        assert await ask("POST", f"{T}/{age}", quota(60, "Time")) == (204, None)
        assert await ask("POST", f"{T}/backlogQuota", quota(5)) == (204, None)
        assert (await broker.client.topics.open("t")).policies.backlog_bytes_max == 5
        assert set((await ask("GET", f"{T}/backlogQuotaMap"))[1]) == {
            "destination_storage",
            "message_age",
        }
        assert await ask("DELETE", f"{T}/backlogQuota") == (204, None)
        assert await ask("DELETE", f"{T}/{age}") == (204, None)
        assert await ask("GET", f"{T}/backlogQuotaMap") == (200, {})
        assert (await broker.client.topics.open("t")).policies.backlog_bytes_max == 1000

    at_a_broker(act)


def test_a_quota_with_an_unknown_field_is_refused_and_null_is_no_field():
    async def act(ask, broker, stage):
        status, body = await ask("POST", f"{N}/backlogQuota", quota(5) | {"foo": 1})
        assert status == 400 and "no field 'foo'" in body["reason"]
        assert (await ask("POST", f"{N}/backlogQuota", quota(5) | {"foo": None}))[0] == 204

    at_a_broker(act)


@pytest.mark.parametrize("limit", [1.5, 1.0, True, None, "x", "1.5", [], 2**80, "9" * 5000])
def test_a_quota_that_is_no_whole_number_is_refused(limit):
    async def act(ask, broker, stage):
        for body in ({"limit": limit}, {"limitSize": limit}):
            body["policy"] = "producer_exception"
            assert (await ask("POST", f"{N}/backlogQuota", body))[0] == 400
        assert await ask("GET", f"{N}/backlogQuotaMap") == (200, {})

    at_a_broker(act)


@pytest.mark.parametrize(
    ("root", "names"),
    [
        (N, {**NOT_IMPLEMENTED, **NOT_IMPLEMENTED_OF_NAMESPACES}),
        (T, {**NOT_IMPLEMENTED, **NOT_IMPLEMENTED_OF_TOPICS}),
    ],
)
def test_a_policy_that_is_not_implemented_shows_as_not_set_and_cannot_be_set(root, names):
    async def act(ask, broker, stage):
        for name, unset in names.items():
            path = f"{root}/{name}"
            assert await ask("GET", path) == ((204, None) if unset is None else (200, unset))
            for method in ("POST", "PUT"):
                status, body = await ask(method, path, 5)
                assert status == 501 and "not implemented" in body["reason"]
            assert await ask("DELETE", path) == (204, None)
            gone = path.replace("default", "gone")
            assert (await ask("GET", gone))[0] == (await ask("DELETE", gone))[0] == 404

    at_a_broker(act)


def test_properties_of_a_namespace_are_added_shown_and_removed():
    async def act(ask, broker, stage):
        path, one = f"{N}/properties", f"{N}/property/a"
        assert await ask("GET", path) == (200, {})
        assert await ask("PUT", path, {"a": "1", "b": "é"}) == (204, None)
        assert await ask("PUT", f"{one}/2") == (204, None)
        assert await ask("GET", path) == (200, {"a": "2", "b": "é"})
        assert await ask("GET", one) == (200, "2")
        assert (await ask("GET", N))[1]["properties"] == {"a": "2", "b": "é"}
        assert await ask("DELETE", one) == (200, "2")
        assert await ask("GET", one) == (204, None) == await ask("DELETE", one)
        for bad, status in (({"a": 1}, 400), ([], 400), ({"a": "x" * PROPERTIES_BYTES_MAX}, 412)):
            assert (await ask("PUT", path, bad))[0] == status
        assert await ask("GET", path) == (200, {"b": "é"})
        assert await ask("DELETE", path) == (204, None)
        assert await ask("GET", path) == (200, {})
        assert (await ask("GET", path.replace("default", "gone")))[0] == 404

    at_a_broker(act)


def test_properties_that_callers_add_at_once_are_all_kept():
    async def act(ask, broker, stage):
        names = [f"p{number}" for number in range(8)]
        path = f"{N}/properties"
        puts = [ask("PUT", path, {name: "1"}) for name in names]
        puts += [ask("PUT", f"{N}/property/q{name}/2") for name in names]
        assert set(await asyncio.gather(*puts)) == {(204, None)}
        expected = dict.fromkeys(names, "1") | {f"q{name}": "2" for name in names}
        assert await ask("GET", path) == (200, expected)

    at_a_broker(act)


def test_the_cluster_of_a_namespace_is_this_one():
    async def act(ask, broker, stage):
        assert await ask("GET", f"{N}/replication") == (200, ["standalone"])
        assert await ask("POST", f"{N}/replication", ["standalone"]) == (204, None)
        assert (await ask("POST", f"{N}/replication", ["other"]))[0] == 412
        assert (await ask("POST", f"{N}/replication", "standalone"))[0] == 400
        status, cluster = await ask("GET", "/admin/v2/clusters/standalone")
        assert status == 200 and cluster["brokerServiceUrl"].startswith("pulsar://")
        assert (await ask("GET", "/admin/v2/clusters/other"))[0] == 404

    at_a_broker(act)


def test_a_negative_time_is_refused_in_the_words_that_clients_compare():
    async def act(ask, broker, stage):
        words = {
            "messageTTL": "Invalid value for message TTL: -5",
            "subscriptionExpirationTime": "Invalid value for subscription expiration time",
        }
        for policy, reason in words.items():
            assert await ask("POST", f"{N}/{policy}", -5) == (412, {"reason": reason})

    at_a_broker(act)


def test_no_role_has_a_grant_and_grants_are_refused():
    async def act(ask, broker, stage):
        for path in (f"{N}/permissions", f"{N}/permissions/subscription", f"{T}/permissions"):
            assert await ask("GET", path) == (200, {})
        assert (await ask("POST", f"{N}/permissions/role", ["produce"]))[0] == 501
        assert (await ask("GET", f"{N}x/permissions"))[0] == 404
        assert (await ask("GET", f"{T}x/permissions"))[0] == 404

    at_a_broker(act)


def test_a_namespace_takes_no_more_partitions_of_topics_than_it_may_have():
    async def act(ask, broker, stage):
        topics = T[: -len("/t")]
        assert await ask("POST", f"{N}/maxTopicsPerNamespace", 4) == (204, None)
        assert await ask("PUT", f"{topics}/two/partitions", 2) == (204, None)
        for method, path, body in (
            ("PUT", f"{topics}/more/partitions", 2),
            ("POST", f"{topics}/two/partitions", 4),
        ):
            status, answer = await ask(method, path, body)
            assert status == 412 and "maximum number of topics" in answer["reason"]
        assert (await ask("PUT", f"{topics}/two/partitions", 2))[0] == 409
        assert await ask("PUT", f"{topics}/last") == (204, None)
        assert (await ask("GET", f"{topics}/new/partitions?checkAllowAutoCreation=true"))[0] == 200
        assert (await ask("PUT", f"{topics}/new"))[0] == 412
        assert await broker.client.topics.find("new") is None
        assert (await broker.client.topics.create("last", exist_ok=True)).name.name == "last"
        assert await ask("DELETE", f"{N}/maxTopicsPerNamespace") == (204, None)
        assert await ask("PUT", f"{topics}/new") == (204, None)

    at_a_broker(act)


@pytest.mark.parametrize("path", [N, T], ids=["namespace", "topic"])
def test_of_two_who_change_quotas_at_once_each_sees_the_change_of_the_other(path):
    age = f"{path}/backlogQuota?backlogQuotaType=message_age"
    size = f"{path}/backlogQuota"
    by_age = {"limitTime": 60, "policy": "producer_exception"}
    by_size = {"limitSize": 5, "policy": "producer_request_hold"}

    async def act(ask, broker, stage):
        answers = await asyncio.gather(ask("POST", size, by_size), ask("POST", age, by_age))
        assert sorted(status for status, _ in answers) == [204, 501], "both share one policy"
        for kind in (size, age):
            await ask("DELETE", kind)
        assert await ask("POST", age, by_age) == (204, None)
        same = by_size | {"policy": "producer_exception"}
        await asyncio.gather(ask("DELETE", age), ask("POST", size, same))
        (left,) = (await ask("GET", f"{path}/backlogQuotaMap"))[1].values()
        assert left["policy"] == "producer_exception"

    at_a_broker(act)


def test_a_namespace_is_not_made_with_ensembles_of_more_bookies_than_there_are():
    async def act(ask, broker, stage):
        new = N.replace("default", "large")
        status, body = await ask("PUT", new, {"persistence": persistence(5, 2, 2)})
        assert status == 412 and "5 bookies, and 4 are registered" in body["reason"]
        assert (await ask("GET", new))[0] == 404

    at_a_broker(act)


def test_policies_of_a_topic_name_no_policy_twice():
    names = [name for policy in POLICIES for name in policy.ours]
    assert len(set(names)) == len(names)
    known = (*vars(TopicPolicies).get("__slots__", ()), "auto_create", "auto_create_partitions")
    assert set(names) <= {*known, "topics_max"}
