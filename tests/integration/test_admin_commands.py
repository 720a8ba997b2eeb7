"""What 64 common commands of pulsar-admin call, in an order in which each command finds what it
needs: 60 are carried out, and the others are refused in words."""

import json
import urllib.error
import urllib.request
import uuid

V2 = "/admin/v2"
SPACE = f"{V2}/namespaces/{{tenant}}/n"
TOPICS = f"{V2}/persistent/{{tenant}}/n"
ONE, MANY = f"{TOPICS}/one", f"{TOPICS}/many"
SUBSCRIPTION = f"{ONE}/subscription/s"
SCHEMAS = f"{V2}/schemas/{{tenant}}/n/one"
TENANT = {"adminRoles": [], "allowedClusters": ["standalone"]}
RETENTION = {"retentionTimeInMinutes": 60, "retentionSizeInMB": 100}
QUOTA = {"limitSize": 10**9, "limitTime": -1, "policy": "producer_request_hold"}
QUORUMS = {"bookkeeperEnsemble": 3, "bookkeeperWriteQuorum": 3, "bookkeeperAckQuorum": 2}
DISPATCH = {"dispatchThrottlingRateInMsg": 100_000, "ratePeriodInSecond": 1}
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
SCHEMA = {"type": "STRING", "schema": "", "properties": {}}
BEFORE_MESSAGES = (
    ("clusters list", "GET", f"{V2}/clusters"),
    ("clusters get", "GET", f"{V2}/clusters/standalone"),
    ("brokers healthcheck", "GET", f"{V2}/brokers/health?topicVersion=V2"),
    ("brokers list", "GET", f"{V2}/brokers/standalone"),
    ("brokers leader-broker", "GET", f"{V2}/brokers/leaderBroker"),
    ("brokers get-runtime-config", "GET", f"{V2}/brokers/configuration/runtime"),
    ("tenants create", "PUT", f"{V2}/tenants/{{tenant}}", TENANT),
    ("tenants list", "GET", f"{V2}/tenants"),
    ("tenants get", "GET", f"{V2}/tenants/{{tenant}}"),
    ("namespaces create", "PUT", SPACE, {}),
    ("namespaces list", "GET", f"{V2}/namespaces/{{tenant}}"),
    ("namespaces policies", "GET", SPACE),
    ("namespaces topics", "GET", f"{SPACE}/topics"),
    ("namespaces set-retention", "POST", f"{SPACE}/retention", RETENTION),
    ("namespaces get-retention", "GET", f"{SPACE}/retention"),
    ("namespaces set-message-ttl", "POST", f"{SPACE}/messageTTL", 3600),
    ("namespaces get-message-ttl", "GET", f"{SPACE}/messageTTL"),
    ("namespaces set-backlog-quota", "POST", f"{SPACE}/backlogQuota", QUOTA),
    ("namespaces get-backlog-quotas", "GET", f"{SPACE}/backlogQuotaMap"),
    ("namespaces set-deduplication", "POST", f"{SPACE}/deduplication", True),
    ("namespaces set-persistence", "POST", f"{SPACE}/persistence", QUORUMS),
    (
        *("namespaces set-auto-topic-creation", "POST", f"{SPACE}/autoTopicCreation"),
        {"allowAutoTopicCreation": True, "topicType": "non-partitioned"},
    ),
    (
        *("namespaces set-schema-compatibility-strategy", "PUT"),
        *(f"{SPACE}/schemaCompatibilityStrategy", "BACKWARD"),
    ),
    ("namespaces set-dispatch-rate", "POST", f"{SPACE}/dispatchRate", DISPATCH),
    (
        *("namespaces set-subscription-expiration-time", "POST"),
        *(f"{SPACE}/subscriptionExpirationTime", 600),
    ),
    ("namespaces set-compaction-threshold", "PUT", f"{SPACE}/compactionThreshold", 10**6),
    ("namespaces grant-permission", "POST", f"{SPACE}/permissions/role", ["produce"]),
    ("namespaces permissions", "GET", f"{SPACE}/permissions"),
    ("topics create", "PUT", ONE),
    ("topics create-partitioned-topic", "PUT", f"{MANY}/partitions", 2),
    ("topics list", "GET", TOPICS),
    ("topics list-partitioned-topics", "GET", f"{TOPICS}/partitioned"),
    ("topics get-partitioned-topic-metadata", "GET", f"{MANY}/partitions"),
    ("topics update-partitioned-topic", "POST", f"{MANY}/partitions?force=false", 3),
    ("topics lookup", "GET", "/lookup/v2/topic/persistent/{tenant}/n/one"),
    ("topics create-subscription", "PUT", SUBSCRIPTION, EARLIEST),
    ("topics subscriptions", "GET", f"{ONE}/subscriptions"),
)
AFTER_MESSAGES = (
    ("topics stats", "GET", f"{ONE}/stats"),
    ("topics stats-internal", "GET", f"{ONE}/internalStats"),
    ("topics partitioned-stats", "GET", f"{MANY}/partitioned-stats?perPartition=true"),
    ("topics peek-messages", "GET", f"{SUBSCRIPTION}/position/1"),
    ("topics examine-messages", "GET", f"{ONE}/examinemessage?initialPosition=latest"),
    ("topics last-message-id", "GET", f"{ONE}/lastMessageId"),
    ("topics get-message-id", "GET", f"{ONE}/messageid/1"),
    ("topics get-backlog-size", "PUT", f"{ONE}/backlogSize", EARLIEST),
    ("topics skip", "POST", f"{SUBSCRIPTION}/skip/1"),
    ("topics expire-messages", "POST", f"{SUBSCRIPTION}/expireMessages/3600"),
    ("topics reset-cursor", "POST", f"{SUBSCRIPTION}/resetcursor/1"),
    ("topics clear-backlog", "POST", f"{SUBSCRIPTION}/skip_all"),
    ("topics set-retention", "POST", f"{ONE}/retention", RETENTION),
    ("topics set-message-ttl", "POST", f"{ONE}/messageTTL?messageTTL=60"),
    ("topics unload", "PUT", f"{ONE}/unload"),
    ("topics compact", "PUT", f"{ONE}/compaction"),
    ("topics compaction-status", "GET", f"{ONE}/compaction"),
    ("schemas upload", "POST", f"{SCHEMAS}/schema", SCHEMA),
    ("schemas get", "GET", f"{SCHEMAS}/schema"),
    ("schemas delete", "DELETE", f"{SCHEMAS}/schema?force=false"),
    ("topics unsubscribe", "DELETE", f"{SUBSCRIPTION}?force=false"),
    ("topics terminate", "POST", f"{ONE}/terminate"),
    ("topics delete", "DELETE", f"{ONE}?force=true"),
    ("topics delete-partitioned-topic", "DELETE", f"{MANY}/partitions?force=true"),
    ("namespaces unload", "PUT", f"{SPACE}/unload"),
    ("namespaces delete", "DELETE", f"{SPACE}?force=false"),
    ("tenants delete", "DELETE", f"{V2}/tenants/{{tenant}}"),
)
COMPACTION = ["namespaces set-compaction-threshold", "topics compact", "topics compaction-status"]


def answer(url, method, path, body=None):
    """The status, and the text of an error."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_common_commands_call_is_carried_out(cluster, client):
    tenant, refused = f"t{uuid.uuid4().hex[:8]}", {}

    def carry_out(commands):
        for name, method, path, *body in commands:
            status, words = answer(cluster.admin_url, method, path.format(tenant=tenant), *body)
            if not 200 <= status < 300:
                refused[name] = status, words

    carry_out(BEFORE_MESSAGES)
    producer = client.create_producer(f"persistent://{tenant}/n/one")
    for number in range(5):
        producer.send(b"%d" % number)
    producer.close()
    carry_out(AFTER_MESSAGES)
    assert len(BEFORE_MESSAGES) + len(AFTER_MESSAGES) == 64
    not_implemented = [name for name, (status, _) in refused.items() if status == 501]
    assert sorted(refused) == sorted(not_implemented), refused
    assert sorted(refused) == sorted(["namespaces grant-permission", *COMPACTION])
    assert all("docs/pulsar.md lists the verbs" in words for _, words in refused.values())
