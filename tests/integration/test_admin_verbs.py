"""Every line of the table of verbs in docs/pulsar.md is called, at a real broker."""

import json
import re
import urllib.error
import urllib.request
import uuid

import pytest

from tests.integration.pulsar_clients import ask
from tests.tidy.sources import ROOT

V2 = "/admin/v2"
SPACE = f"{V2}/namespaces/{{tenant}}/{{namespace}}"
TOPIC = f"{V2}/persistent/{{tenant}}/{{namespace}}/{{topic}}"
IN_MEMORY = TOPIC.replace("persistent", "non-persistent")
SUBSCRIPTION = f"{TOPIC}/subscription/{{subscription}}"
SCHEMAS = f"{V2}/schemas/{{tenant}}/{{namespace}}/{{topic}}"
TENANT = {"adminRoles": [], "allowedClusters": ["standalone"]}
EARLIEST = {"ledgerId": -1, "entryId": -1}
SCHEMA = {"type": "STRING", "schema": "", "properties": {}}
BODIES = {
    f"PUT {V2}/tenants/{{tenant}}": TENANT,
    f"POST {V2}/tenants/{{tenant}}": TENANT,
    f"POST {SCHEMAS}/schema": SCHEMA,
    f"POST {SCHEMAS}/compatibility": SCHEMA,
    f"POST {SCHEMAS}/version": SCHEMA,
    f"PUT {SPACE}/properties": {"a": "b"},
    f"PUT {TOPIC}/partitions": 2,
    f"POST {TOPIC}/partitions": 3,
    f"PUT {TOPIC}/properties": {"a": "b"},
    f"PUT {TOPIC}/backlogSize": EARLIEST,
    f"PUT {SUBSCRIPTION}": EARLIEST,
    f"PUT {SUBSCRIPTION}/properties": {"a": "b"},
    f"POST {SUBSCRIPTION}/expireMessages": EARLIEST,
    f"POST {SUBSCRIPTION}/resetcursor": EARLIEST,
}
REFUSED = {
    f"POST {V2}/brokers/configuration/{{name}}/{{value}}": 412,
    f"DELETE {V2}/brokers/configuration/{{name}}": 412,
    f"GET {TOPIC}/compaction": 501,
    f"PUT {TOPIC}/compaction": 501,
    f"DELETE {IN_MEMORY}/subscription/{{subscription}}": 404,
}
OF_PARTITIONS = ("/partition", "/partitioned-", "/terminate/partitions", "/createMissed")
PLACES = {
    "domain": "persistent",
    "cluster": "standalone",
    "bundle": "0x00000000_0xffffffff",
    "subscription": "s",
    "topic_id": str(uuid.UUID(int=7)),
    **dict.fromkeys(("version", "ms", "count", "seconds", "value", "entry"), "0"),
    **dict.fromkeys(("name", "key"), "x"),
    "position": "1",
}


def lines():
    """Every (method, path) of the table."""
    text = (ROOT / "docs/pulsar.md").read_text()
    rows = re.findall(r"^\| ((?:[A-Z]+ )+)`(/[^`]+)` \|", text, re.M)
    return [(method, path) for methods, path in rows for method in methods.split()]


def test_every_line_of_the_docs_is_answered_as_it_says(cluster, client):
    url, tenant = cluster.admin_url, f"t{uuid.uuid4().hex[:12]}"
    assert len(lines()) > 100
    wrong = {}
    for number, (method, path) in enumerate(lines()):
        line, topic = f"{method} {path}", f"x{number}"
        usual = line.replace("/non-persistent/{", "/persistent/{")
        domain = "persistent" if usual == line else "non-persistent"
        places = PLACES | {"tenant": tenant, "namespace": "n", "topic": topic}
        places["address"] = url.partition("://")[2]
        made = made_for(url, client, usual, places, domain)
        answered = call(url, method, path.format(**places | made), BODIES.get(usual))
        expected = (REFUSED[line],) if line in REFUSED else (200, 202, 204)
        if is_policy(path) and method in ("POST", "PUT"):
            expected = (204, 400, 412)  # a policy needs its value
        if answered[0] not in expected:
            wrong[line] = answered
    assert wrong == {}


def is_policy(path):
    """Whether the table's other half has the path: policies, whose values have tests of their
    own."""
    last = path.rpartition("/")[2]
    return (
        path.rpartition("/")[0] in (SPACE, TOPIC)
        and last
        not in (
            *("unload", "topics", "bundles", "partitions", "properties", "createMissedPartitions"),
            *("terminate", "compaction", "backlogSize", "clearBacklog"),
        )
    ) or "/property/" in path


def made_for(url, client, line, places, domain):
    """Make what the line needs to succeed; the places in its path that this determines."""
    method, path = line.split()
    space, topic = "{tenant}/n".format(**places), domain + "/{tenant}/n/{topic}".format(**places)
    if line == f"PUT {V2}/tenants/{{tenant}}":
        return {"tenant": f"{places['tenant']}x"}
    if line == f"DELETE {V2}/tenants/{{tenant}}":
        return {"tenant": f"{places['tenant']}x"}
    ask(url, "PUT", f"tenants/{places['tenant']}", TENANT)
    if line == f"PUT {SPACE}":
        return {"namespace": "m"}
    if line == f"DELETE {SPACE}":
        return {"namespace": "m"}
    ask(url, "PUT", f"namespaces/{space}")
    if "/property/{key}" in path and method != "PUT":
        ask(url, "PUT", f"namespaces/{space}/property/x/0")
    if "{topic}" not in path or line in (f"PUT {TOPIC}", f"PUT {TOPIC}/partitions"):
        return {}
    if any(part in path for part in OF_PARTITIONS):
        assert ask(url, "PUT", f"{topic}/partitions", 2) == (204, None)
        return {}
    assert ask(url, "PUT", topic) == (204, None)
    if path.startswith(SCHEMAS) and line != f"POST {SCHEMAS}/schema":
        assert ask(url, "POST", f"schemas/{space}/{places['topic']}/schema", SCHEMA)[0] == 200
    is_stored = domain == "persistent"
    if "{subscription}" in path and line != f"PUT {SUBSCRIPTION}" and is_stored:
        assert ask(url, "PUT", f"{topic}/subscription/s", EARLIEST) == (204, None)
    if not path.endswith(("{entry}", "{position}", "/examinemessage", "/lastMessageId")):
        return {}
    producer = client.create_producer(topic.replace("/", "://", 1), batching_enabled=False)
    sent = producer.send(b"x")
    producer.close()
    return {"ledger": str(sent.ledger_id())}


def call(url, method, path, body):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()[:300]
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


@pytest.mark.parametrize(
    "path", ["functions/public/default", "persistent/public/default/t/offload"]
)
def test_what_the_docs_do_not_list_is_501_with_words(cluster, path):
    status, body = ask(cluster.admin_url, "GET", path)
    assert status == 501 and "docs/pulsar.md" in body["reason"]
