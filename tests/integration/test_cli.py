"""The command line as a user runs it: `spark-ledger ...` in a process of its own, which is started
anew where the environment is part of the test, and is a fork with all imports elsewhere."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from spark_ledger import LedgerClient
from spark_ledger.cli.common import with_topics
from spark_ledger.local import LocalCluster, background
from spark_ledger.local.processes import free_port
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import TxnKey
from tests.kit.cli import fails, spark_ledger, succeeds
from tests.kit.loop_task import LoopTask
from tests.kit.processes import alive, descendants, eventually


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory):
    """A cluster brought up by `spark-ledger up`: its folder and what `up` said."""
    folder = tmp_path_factory.mktemp("up") / "cluster"
    port = free_port()
    ports = ("--port", port, "--broker-port", free_port(), "--admin-port", free_port())
    said = succeeds("up", "--bookies", 3, *ports, "--data-dir", folder, "--json")
    yield folder, json.loads(said)
    if spark_ledger("status", "--data-dir", folder).returncode == 0:
        succeeds("down", "--data-dir", folder)


def test_a_ledger_can_be_created_when_up_returns(up):
    with LedgerClient(up[1]["service_url"]) as client, client.create_ledger(3, 3, 2) as ledger:
        assert ledger.append(b"first") == 0


def test_up_with_fewer_bookies_than_copies_is_refused_unless_the_folder_has_more(tmp_path):
    wrong = fails("up", "--bookies", 2, "--data-dir", tmp_path / "few")
    assert "with 2 bookies no row and no message can be stored" in wrong
    assert not (tmp_path / "few").exists()
    for number in range(3):
        (tmp_path / "more" / "bookies" / str(number)).mkdir(parents=True)
    background.refuse_too_few(tmp_path / "more", 1)


def test_status_lists_the_bookies_and_brokers_of_the_folders_cluster(up):
    folder, said = up
    status = json.loads(succeeds("status", "--data-dir", folder, "--json"))
    assert status["service_url"] == said["service_url"]
    assert [bookie["state"] for bookie in status["bookies"]] == ["writable"] * 3
    assert [broker["url"] for broker in status["brokers"]] == [said["broker_url"]]
    shown = succeeds("status", "--data-dir", folder)
    assert said["service_url"] in shown and said["broker_url"] in shown
    listed = succeeds("broker", "list", "--service-url", said["service_url"])
    assert said["broker_url"] in listed and "INCOMPLETE MESSAGES" in listed


def test_a_cluster_that_never_had_a_broker_has_none(fresh_cluster):
    url = ("--service-url", fresh_cluster(bookies=1).service_url)
    assert json.loads(succeeds("broker", "list", "--json", *url)) == []
    assert "no brokers" in succeeds("status", *url)


@pytest.mark.parametrize("verb", [("status",), ("bookie", "list"), ("broker", "list")])
def test_where_there_is_no_cluster_a_list_is_an_error_and_not_empty(
    cluster: LocalCluster, verb: tuple[str, ...]
):
    elsewhere = f"zk://{cluster.zookeeper.address}/elsewhere"
    error = fails(*verb, "--service-url", elsewhere)
    assert f"there is no cluster at {elsewhere}" in error


def test_what_is_up_already_is_said_with_the_remedy(up):
    ports = ("--port", free_port(), "--broker-port", free_port(), "--admin-port", free_port())
    assert "up already" in fails("up", "--data-dir", up[0], *ports)


def test_parts_of_a_cluster_that_have_died_are_named_with_what_starts_them(tmp_path: Path):
    folder = tmp_path / "c"
    ports = {"--port": free_port(), "--broker-port": free_port(), "--admin-port": free_port()}
    options = [word for pair in ports.items() for word in pair] + ["--data-dir", folder]
    cluster = json.loads(succeeds("up", *options, "--json"))
    try:
        assert "died" not in fails("up", *options)
        processes = {
            pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            for pid in descendants(cluster["pid"])
        }

        def kill(*words: str) -> None:
            pid = min(pid for pid, line in processes.items() if {*words} <= {*line})
            os.kill(pid, signal.SIGKILL)
            del processes[pid]

        kill("broker", "start")
        command = f"broker start --service-url {cluster['service_url']}"
        assert eventually(lambda: "its broker has died" in fails("up", *options))
        refusal = fails("up", *options)
        assert command in refusal and f"--broker-port {ports['--broker-port']}" in refusal
        assert f"--admin-port {ports['--admin-port']}" in refusal
        kill("bookie_server")
        died = re.compile(r"have died: bookie \d, broker")
        assert eventually(lambda: died.search(fails("up", *options)))
        assert "spark-ledger down" in fails("up", *options)
    finally:
        succeeds("down", "--data-dir", folder)


def test_a_taken_port_is_named(up, tmp_path: Path):
    port = up[1]["service_url"].split(":")[2].partition("/")[0]
    wanted = ("--port", port, "--no-broker")
    assert f"port {port} is taken" in fails("up", "--data-dir", tmp_path / "c", *wanted)


@pytest.mark.parametrize(("url", "flag"), [("broker_url", "broker"), ("admin_url", "admin")])
def test_the_brokers_ports_are_served_and_a_taken_one_is_named_with_its_flag(
    up, tmp_path: Path, url: str, flag: str
):
    port = up[1][url].rpartition(":")[2]
    with socket.create_connection(("127.0.0.1", int(port))):
        pass
    ports = {"--broker-port": free_port(), "--admin-port": free_port(), f"--{flag}-port": port}
    wanted = [part for pair in ports.items() for part in pair]
    said = fails("up", "--data-dir", tmp_path / "c", "--port", free_port(), *wanted)
    assert f"port {port} is taken" in said
    assert f"--{flag}-port" in said


def test_a_cluster_whose_up_was_killed_before_it_was_ready_stops_in_good_order(tmp_path: Path):
    arguments = {"data_dir": str(tmp_path / "c"), "bookies": 1, "port": free_port()}
    (tmp_path / "c").mkdir()
    command = [sys.executable, "-m", "spark_ledger.local.background"]
    command.append(json.dumps({**arguments, "merge_bytes": 1 << 20}))
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.close()  # as when the process that reads it ends
    log = child.stderr.read()
    assert child.wait(60) == 0, log
    assert "`spark-ledger up` ended before the cluster was ready: the cluster stops" in log
    assert "Traceback" not in log
    assert not (tmp_path / "c" / background.STATE_FILE).exists()


def test_without_java_up_says_so(tmp_path: Path):
    wanted = ("--data-dir", tmp_path / "c", "--no-broker")
    said = fails("up", *wanted, env={"JAVA_HOME": str(tmp_path)})
    assert f"JAVA_HOME={tmp_path} holds no bin/java" in said


@pytest.mark.parametrize("verb", ["down", "status"])
def test_nothing_up_in_the_folder_is_one_line(verb: str, tmp_path: Path):
    assert f"no cluster is up in {tmp_path}" in fails(verb, "--data-dir", tmp_path)


def test_down_ends_every_process_and_up_takes_the_same_bookies_again(up):
    folder, said = up
    port = said["service_url"].split(":")[2].partition("/")[0]

    def ids() -> list[str]:
        status = json.loads(succeeds("status", "--data-dir", folder, "--json"))
        return [bookie["id"] for bookie in status["bookies"]]

    before, processes = ids(), [said["pid"], *descendants(said["pid"])]
    assert len(processes) == 7  # the background process, ZooKeeper, guardian, 3 bookies, a broker
    succeeds("down", "--data-dir", folder)
    assert not alive(processes)
    succeeds("up", "--data-dir", folder, "--port", port, "--no-broker")
    assert ids() == before


def test_status_of_a_cluster_whose_zookeeper_died_says_how_to_mend_it(up):
    folder, said = up
    port = said["service_url"].split(":")[2].partition("/")[0]
    running = json.loads((folder / "cluster.json").read_text())["pid"]
    (zookeeper,) = [pid for pid in descendants(running) if "java" in comm(pid)]
    os.kill(zookeeper, signal.SIGKILL)
    assert eventually(lambda: not alive([zookeeper]))
    assert "`spark-ledger down`, then" in fails("status", "--data-dir", folder)
    succeeds("down", "--data-dir", folder)
    succeeds("up", "--data-dir", folder, "--port", port, "--no-broker")
    assert "writable" in succeeds("status", "--data-dir", folder)


def test_topics_are_created_listed_and_described(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    assert "4 partition(s)" in succeeds("topic", "create", "cli-flights", "--partitions", 4, *url)
    listed = json.loads(succeeds("topic", "list", "--json", *url))
    mine = [topic for topic in listed if topic["topic"].endswith("/cli-flights")]
    assert [topic["partitions"] for topic in mine] == [4]
    described = json.loads(succeeds("topic", "describe", "cli-flights", "--json", *url))
    assert described["id"] == mine[0]["id"]
    assert [offset["end_offset"] for offset in described["offsets"]] == [0, 0, 0, 0]
    assert mine[0]["id"] in succeeds("topic", "list", *url)
    assert "PARTITION" in succeeds("topic", "describe", "cli-flights", *url)


def test_a_topic_is_created_once_and_an_unknown_one_names_its_neighbour(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    succeeds("topic", "create", "cli-once", *url)
    assert "[LEDGER_TOPIC" in fails("topic", "create", "cli-once", *url)
    assert "cli-once" in fails("topic", "describe", "cli-onse", *url)


def test_deleted_topics_are_gone(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    succeeds("topic", "create", "cli-gone", *url)
    succeeds("topic", "create", "cli-gone-too", *url)
    succeeds("topic", "delete", "cli-gone", "cli-gone-too", "--yes", *url)
    assert "/cli-gone" not in succeeds("topic", "list", "--json", *url)
    assert "[LEDGER_TOPIC" in fails("topic", "describe", "cli-gone", *url)


def test_the_tail_of_an_empty_topic_is_empty(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    succeeds("topic", "create", "cli-empty", *url)
    assert succeeds("topic", "tail", "cli-empty", "--no-follow", *url) == ""


def write_rows(service_url: str, topic: str, rows: dict[str, str]) -> None:
    """As a Spark batch of one task would."""

    async def work(client: TopicClient) -> None:
        info = await client.topics.open(topic)
        intent = await client.intents.open_batch_intent("app", "run", topic)
        writer = LoopTask(client, info, intent, task_index=0)
        await writer.write(pa.array(rows.keys()), pa.array(rows.values()))
        txn = TxnKey("app", topic, 0, "run")
        results = {info.id: [await writer.finish()]}
        await client.commit_topics(results, txn, intent.id, finish_intent=True)

    with_topics(service_url, work)


def test_the_tail_shows_the_last_rows_with_their_offsets(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    succeeds("topic", "create", "cli-tail", *url)
    write_rows(cluster.service_url, "cli-tail", {"a": "one", "b": "two", "c": "three"})
    shown = succeeds("topic", "tail", "cli-tail", "--rows", 2, "--no-follow", *url)
    assert shown == "0\t1\tb\ttwo\n0\t2\tc\tthree\n"
    lines = succeeds("topic", "tail", "cli-tail", "--no-follow", "--json", *url).splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["a", "b", "c"]


def test_a_tail_that_follows_shows_what_comes_later(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    succeeds("topic", "create", "cli-follow", *url)
    command = [sys.executable, "-m", "spark_ledger.cli.main", "topic", "tail", "cli-follow", *url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tail:
        write_rows(cluster.service_url, "cli-follow", {"k": "later"})
        assert tail.stdout is not None
        assert tail.stdout.readline() == "0\t0\tk\tlater\n"
        tail.kill()


def test_clean_says_what_it_would_do(cluster: LocalCluster):
    report = json.loads(
        succeeds("topic", "clean", "--dry-run", "--json", "--service-url", cluster.service_url)
    )
    assert report["dry_run"] is True


def test_a_ledger_is_shown_read_and_recovered(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    with LedgerClient(cluster.service_url) as client:
        ledger = client.create_ledger(3, 3, 2, metadata={"made by": "a test"})
        payloads = [b"plain text", b"\x00\xff", b""]
        for payload in payloads:
            ledger.append(payload)
        ledger_id = ledger.ledger_id
        shown = json.loads(succeeds("ledger", "show", ledger_id, "--json", *url))
        assert shown["state"] == "OPEN"
        assert shown["custom"] == {"made by": "a test"}
        recovered = json.loads(succeeds("ledger", "recover", ledger_id, "--json", *url))
        assert (recovered["state"], recovered["last_entry"]) == ("CLOSED", 2)
    lines = succeeds("ledger", "read", ledger_id, "--json", *url).splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["entry"] for entry in entries] == [0, 1, 2]
    assert [base64.b64decode(entry["payload_base64"]) for entry in entries] == payloads
    assert succeeds("ledger", "read", ledger_id, "--last", 1, *url) == "0\tplain text\n1\t0x00ff\n"
    listed = json.loads(succeeds("ledger", "list", "--json", *url))
    assert ledger_id in [ledger["ledger_id"] for ledger in listed]
    assert "CLOSED" in succeeds("ledger", "show", ledger_id, *url)


def test_a_ledger_is_read_while_it_is_written_and_its_password_is_asked_for(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    with LedgerClient(cluster.service_url) as client:
        with client.create_ledger(password=b"secret") as writer:
            assert [writer.append(b"entry") for _ in range(2)] == [0, 1]
            ask = ("ledger", "read", writer.ledger_id, *url)
            reader = client.open_ledger(writer.ledger_id, recover=False, password=b"secret")
            while reader.last_add_confirmed < 1:
                pass
            assert succeeds(*ask, "--password", "secret") == "0\tentry\n1\tentry\n"
            for wrong in ((), ("--password", "guess")):
                assert "[LEDGER_WRITE.UNAUTHORIZED]" in fails(*ask, *wrong)
            assert writer.append(b"entry") == 2
        assert succeeds(*ask, "--password", "secret", "--first", 2) == "2\tentry\n"
        assert "[LEDGER_CONFIG.INVALID] --last 1 is below --first 2" in fails(
            *ask, "--first", 2, "--last", 1
        )


def test_a_ledger_that_is_not_there_is_one_line(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    assert "987654321" in fails("ledger", "show", 987654321, *url)


def test_the_service_url_comes_from_the_environment(cluster: LocalCluster):
    env = {"LEDGER_SERVICE_URL": cluster.service_url}
    assert json.loads(succeeds("topic", "list", "--json", env=env)) is not None


def test_status_looks_where_the_environment_says_unless_a_folder_is_named(
    cluster: LocalCluster, tmp_path: Path
):
    env = {"LEDGER_SERVICE_URL": cluster.service_url}
    status = json.loads(succeeds("status", "--json", env=env))
    assert status["service_url"] == cluster.service_url
    assert f"no cluster is up in {tmp_path}" in fails("status", "--data-dir", tmp_path, env=env)


def test_a_cluster_that_does_not_answer_is_named():
    url = f"zk://127.0.0.1:{free_port()}/ledger"
    assert url in fails("topic", "list", "--service-url", url)
    assert "no service URL" in fails("topic", "list", "--service-url", "nonsense")


def test_an_audit_on_spark_without_pyspark_is_one_line(tmp_path: Path):
    package = tmp_path / "pyspark"
    package.mkdir()
    missing = "raise ModuleNotFoundError(\"No module named 'pyspark'\", name='pyspark')\n"
    (package / "__init__.py").write_text(missing)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = fails("ledger", "audit", "--spark", env={"PYTHONPATH": path})
    assert "[LEDGER_CONFIG.INVALID] --spark needs PySpark, which is not installed" in said
