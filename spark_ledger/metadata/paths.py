"""Where each record lives in the metadata store, below the cluster's root.

A ledger id is written with 19 digits and cut 3/4/4/4/4, so that every id up to 2^63-1 has a path
and no node has more than 10,000 children. Intermediate nodes are never deleted: a missing parent
means a broken tree, not an empty one.
"""

CLUSTER = "/cluster"
LEDGERS = "/ledgers"
LEDGER_IDS = "/ledger-ids"
CHAIN = "/chain"
HELD = "/held"
BOOKIES_AVAILABLE = "/bookies/available"
BOOKIES_READONLY = "/bookies/readonly"
BOOKIES_KNOWN = "/bookies/known"  # the last registration of each bookie, kept when it stops
BOOKIES_DRAINING = "/bookies/draining"
BOOKIES_STARTS = "/bookies/starts"
LIMBO = "/limbo"
UNRECORDED = "/unrecorded"
INTENTS = "/intents"
QUERIES = "/queries"  # by query and target: the intent of the newest run
TXNS = "/txns"
TOPICS = "/topics"
NON_PERSISTENT = "/non-persistent"
TOPIC_IDS = "/topic-ids"
TOPICS_DELETED = "/topics-deleted"
STORE_CLOCK = "/store-clock"
MAINTAINER = "/maintainer"
AUDITOR = "/auditor"
AUTORECOVERY = "/autorecovery"
REPAIR_CREDENTIAL = "/repair-credential"
BROKERS_ALIVE = "/brokers/alive"
BROKERS_TOPICS = "/brokers/topics"
UNDERREPLICATED = "/underreplicated/ledgers"
UNDERREPLICATED_LOCKS = "/underreplicated/locks"
LEDGER_ID_MAX = 2**63 - 1

_CUTS = ((0, 3), (3, 7), (7, 11), (11, 15), (15, 19))


def ledger(ledger_id: int) -> str:
    """The path of a ledger's record. Raises ValueError outside 0 .. 2^63-1."""
    return f"{LEDGERS}/{_cut(ledger_id)}"


def ledger_folder(ledger_id: int) -> str:
    """The folder of the ledger's record; its value names the deleted ledgers of the folder."""
    return ledger(ledger_id).rpartition("/")[0]


def first_in_folder(folder: str) -> int:
    """The lowest ledger id whose record belongs in the folder."""
    return int(folder.removeprefix(LEDGERS).replace("/", "") + "0" * name_digits(15))


def underreplicated(ledger_id: int) -> str:
    """The node that lists the ledger as under-replicated. Raises ValueError as `ledger` does."""
    return f"{UNDERREPLICATED}/{_cut(ledger_id)}"


def underreplicated_lock(ledger_id: int) -> str:
    """The ephemeral of the worker that repairs the ledger."""
    return f"{UNDERREPLICATED_LOCKS}/{ledger_id}"


def _cut(ledger_id: int) -> str:
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise ValueError(f"a ledger id is between 0 and 2^63-1, got {ledger_id}")
    digits = f"{ledger_id:019d}"  # cut at _CUTS
    return f"{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/{digits[15:]}"


def broker(broker_id: str) -> str:
    """The broker's ephemeral, while it is alive."""
    return f"{BROKERS_ALIVE}/{broker_id}"


def brokers_of_topic(topic_id: str) -> str:
    """The record of the brokers that have the topic's partitions."""
    return f"{BROKERS_TOPICS}/{topic_id}"


def draining(bookie_id: str) -> str:
    """Exists while the bookie is being drained of its copies."""
    return f"{BOOKIES_DRAINING}/{bookie_id}"


def held(bookie_id: str) -> str:
    """The bookie's report for operators while the store is held: ledgers that the store lacks."""
    return f"{HELD}/{bookie_id}"


def bookie_start(bookie_id: str) -> str:
    """The record of the bookie's newest start; it stays after the bookie's end."""
    return f"{BOOKIES_STARTS}/{bookie_id}"


def name_digits(digits: int) -> int:
    """The length of each name in a folder. The folder's own path has `digits` of an id's digits."""
    return next(b - a for a, b in _CUTS if a == digits)


def limbo(bookie_id: str, ledger_id: int | None = None) -> str:
    """The bookie's list of ledgers in limbo, or one ledger in that list."""
    listed = f"{LIMBO}/{bookie_id}"
    return listed if ledger_id is None else f"{listed}/{ledger_id}"


def unrecorded(bookie_id: str) -> str:
    """The bookie's list of ledgers that it keeps without a record."""
    return f"{UNRECORDED}/{bookie_id}"


def tenant(name: str) -> str:
    """The tenant's record; its namespaces are below it."""
    return f"{TOPICS}/{name}"


def namespace(tenant: str, name: str) -> str:
    """The namespace's record (policies for its topics). The names of the topics are below it."""
    return f"{TOPICS}/{tenant}/{name}"


def topic_name(tenant: str, in_namespace: str, topic: str) -> str:
    return f"{namespace(tenant, in_namespace)}/{topic}"


def non_persistent_topics(tenant: str, namespace: str) -> str:
    """The folder of the records of a namespace's topics that are only in memory."""
    return f"{NON_PERSISTENT}/{tenant}/{namespace}"


def topic(topic_id: str) -> str:
    return f"{TOPIC_IDS}/{topic_id}"


def topic_head(topic_id: str) -> str:
    return f"{topic(topic_id)}/head"


def topic_log(topic_id: str, number: int | None = None) -> str:
    """The topic's log, or the commit with that number in it."""
    log = f"{topic(topic_id)}/log"
    return log if number is None else f"{log}/{number:010d}"


def subscriptions(topic_id: str) -> str:
    """The folder of the topic's subscriptions. Its version changes when a subscription is made or
    is moved back; a trim checks the version."""
    return f"{topic(topic_id)}/subscriptions"


def subscription(topic_id: str, name: str) -> str:
    """The record of a subscription (its name escaped by the caller)."""
    return f"{subscriptions(topic_id)}/{name}"


def subscription_marks(topic_id: str, name: str, number: int | None = None) -> str:
    """The folder of the subscription's marks (positions with times), or one mark."""
    marks = f"{subscription(topic_id, name)}/marks"
    return marks if number is None else f"{marks}/{number:010d}"


def subscription_share(topic_id: str, name: str, broker_id: str | None = None) -> str:
    """A broker's share (the positions of its consumers), or the folder of the shares."""
    shares = f"{subscription(topic_id, name)}/shares"
    return shares if broker_id is None else f"{shares}/{broker_id}"


def acks(topic_id: str, partition: int | None = None) -> str:
    """The node of a partition's acknowledgements, or the folder of these nodes. The version of the
    folder changes when a node is made."""
    folder = f"{topic(topic_id)}/acks"
    return folder if partition is None else f"{folder}/{partition}"


def ack_copy(topic_id: str, copy_id: str) -> str:
    """A copy of what a subscription acknowledged, made for one query; see topic/acks/copies.py."""
    return f"{acks(topic_id)}/copy-{copy_id}"


def ack_moves(topic_id: str) -> str:
    """A node whose version counts how often a subscription of the topic was moved or deleted by a
    process that does not serve it."""
    return f"{acks(topic_id)}/moves"


def topic_schema(topic_id: str, version: int | None = None) -> str:
    """The record of the topic's current schema, or one version of the schema."""
    return schema_in(topic(topic_id), version)


def schema_in(folder: str, version: int | None = None) -> str:
    """As `topic_schema`, of the topic whose nodes are in the folder."""
    schema = f"{folder}/schema"
    return schema if version is None else f"{schema}/{version:05d}"


def topic_checkpoint(topic_id: str) -> str:
    return f"{topic(topic_id)}/checkpoint"


def topic_unheld(topic_id: str) -> str:
    """Its time shows when queries without a subscription, which hold no rows, read the topic."""
    return f"{topic(topic_id)}/unheld"


def topic_deleted(topic_id: str) -> str:
    """The record of a topic's deletion, with its time; it is removed after all other nodes."""
    return f"{TOPICS_DELETED}/{topic_id}"


def intent(intent_id: str) -> str:
    return f"{INTENTS}/{intent_id}"


def intent_heartbeat(intent_id: str) -> str:
    return f"{intent(intent_id)}/heartbeat"


def intent_blocks(intent_id: str) -> str:
    return f"{intent(intent_id)}/blocks"


def txn(app_id: str, target: str) -> str:
    """The record of the highest version that `app_id` committed to `target` (escaped by the
    caller)."""
    return f"{TXNS}/{app_id}/{target}"
