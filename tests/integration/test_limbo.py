"""A bookie that may have lost something, as a user meets it: listed, repaired by the command, and
served by that bookie again."""

import json
import shutil
from pathlib import Path

import pytest

from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBookie
from tests.kit.cli import spark_ledger, succeeds
from tests.kit.processes import eventually

SETTINGS: dict[str, object] = {"limbo_check_s": 0.5, "refresh_s": 1, "session_timeout_s": 2}
NEVER_S, SOON_S = 600, 0.2  # when what was acknowledged leaves the journal
BLOCK_BYTES = 4096
PAYLOADS = [b"payload %d " % number * 50 for number in range(20)]


def state_of(cluster: LocalCluster, bookie: LocalBookie) -> str:
    rows = json.loads(succeeds("bookie", "list", "--json", "--service-url", cluster.service_url))
    return next(row["state"] for row in rows if row["id"] == bookie.id)


def listed(cluster: LocalCluster) -> list[dict]:
    found: list[dict] = json.loads(
        succeeds("ledger", "limbo", "--json", "--service-url", cluster.service_url)
    )
    return found


def damage_a_journal_record(bookie: LocalBookie) -> None:
    """A flipped bit in an entry that was acknowledged, and that later batches vouch for."""
    bookie.kill()
    for path in sorted(bookie.folder.rglob("*.journal")):
        data = bytearray(path.read_bytes())
        at = data.find(PAYLOADS[3])
        if at >= 0:
            data[at + 5] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("the journal does not hold the entry")


def has_everything(bookie: LocalBookie) -> bool:
    """Whether the journal holds the last entry: an append needs only two bookies of three."""
    return any(PAYLOADS[-1] in path.read_bytes() for path in bookie.folder.rglob("*.journal"))


def lose_what_the_ledger_directory_held(bookie: LocalBookie) -> None:
    bookie.stop()  # flushed
    for folder in ("entrylog", "index"):
        shutil.rmtree(Path(bookie.folder) / "ledgers" / folder)


@pytest.mark.parametrize(
    ("harm", "flush_s"),
    [(damage_a_journal_record, NEVER_S), (lose_what_the_ledger_directory_held, SOON_S)],
)
def test_a_bookie_that_lost_something_lists_it_and_the_command_brings_it_back(
    fresh_cluster, harm, flush_s
):
    settings = {**SETTINGS, "flush_interval_s": flush_s}
    cluster: LocalCluster = fresh_cluster(bookies=3, bookie_settings=settings)
    bookie = cluster.bookies[0]
    with LedgerClient(cluster.service_url) as client:
        with client.create_ledger(3, 3, 2) as writer:
            for payload in PAYLOADS:
                writer.append(payload)
            ledger_id = writer.ledger_id
        assert eventually(lambda: all(has_everything(each) for each in cluster.bookies))
        assert listed(cluster) == []
        harm(bookie)
        bookie.start()
        assert eventually(lambda: [one["ledger_id"] for one in listed(cluster)] == [ledger_id])
        (one,) = listed(cluster)
        assert (one["bookie_id"], one["reason"]) == (bookie.id, "lost")
        url = ("--service-url", cluster.service_url)
        assert "lost" in succeeds("ledger", "limbo", *url)
        said = json.loads(succeeds("ledger", "recover", ledger_id, "--json", *url))
        assert said["state"] == "CLOSED"
        assert all(one["cleared"] for one in said["repaired"])
        copied = {one["bookie_id"]: one["copied"] for one in said["repaired"]}
        assert sorted(copied) == sorted(one.id for one in cluster.bookies)
        assert copied.pop(bookie.id) >= 1
        assert not any(copied.values())
        assert eventually(lambda: listed(cluster) == [])
        for other in cluster.bookies[1:]:
            other.stop()
        reader = client.open_ledger(ledger_id, recover=False)
        found = [bytes(payload) for _, payload in reader.read(0, len(PAYLOADS) - 1)]
        assert found == PAYLOADS


def tear(bookie: LocalBookie) -> None:
    """The batch of the last entry, as a power loss in mid-write leaves it, and nothing after it
    that vouches for it: not the last add confirmed either, which may be in the same batch."""
    for path in sorted(bookie.folder.rglob("*.journal")):
        data = bytearray(path.read_bytes())
        at = data.find(PAYLOADS[-1])
        if at >= 0:
            data[at + 5] ^= 1
            end, rest = at + len(PAYLOADS[-1]), (at // BLOCK_BYTES + 1) * BLOCK_BYTES
            data[end:rest] = b"\xff" * (rest - end)
            data[rest:] = bytes(len(data) - rest)
            path.write_bytes(data)


def test_torn_everywhere_and_one_bookie_gone_for_good_a_ledger_is_closed_by_who_declares_it(
    fresh_cluster,
):
    settings = {**SETTINGS, "flush_interval_s": NEVER_S}
    cluster: LocalCluster = fresh_cluster(bookies=3, bookie_settings=settings)
    url = ("--service-url", cluster.service_url)
    *torn, gone = cluster.bookies
    with LedgerClient(cluster.service_url) as client:
        writer = client.create_ledger(3, 3, 2)
        for payload in PAYLOADS:
            writer.append(payload)
        assert eventually(lambda: all(has_everything(each) for each in cluster.bookies))
    # its writer is gone: it would tell the bookies of the last add confirmed again
    for bookie in cluster.bookies:
        bookie.kill()
    for bookie in torn:
        tear(bookie)
        bookie.start()
    assert eventually(lambda: {one["reason"] for one in listed(cluster)} == {"torn"})
    recover = ("ledger", "recover", writer.ledger_id, *url)
    unknown = spark_ledger(*recover, "--gone", "nobody")
    assert unknown.returncode == 1
    assert "bookie 'nobody' does not hold the end" in unknown.stderr
    assert eventually(lambda: state_of(cluster, gone) == "down"), "its session ends"
    said = json.loads(succeeds(*recover, "--gone", gone.id, "--json"))
    assert (said["state"], said["last_entry"]) == ("CLOSED", len(PAYLOADS) - 2)
    assert {one["bookie_id"]: one["cleared"] for one in said["repaired"]} == {
        **{each.id: True for each in torn},
        gone.id: False,
    }
    assert eventually(lambda: listed(cluster) == [])
