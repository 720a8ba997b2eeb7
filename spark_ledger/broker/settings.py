"""Every setting of a broker, with its default and meaning; conf/broker.toml lists them."""

from typing import ClassVar, Literal

from pydantic import Field

from bookie_server.api.settings import DEFAULT_SERVICE_URL, Settings, load
from spark_ledger.broker.wire.frames import MESSAGE_BYTES_MAX
from spark_ledger.net import PORT_MAX
from spark_ledger.topic.log.policies import OWN_ROLL_S_MAX

MIB = 1 << 20


class BrokerSettings(Settings):
    """The settings of a broker. Sizes are bytes, times are seconds."""

    SECTIONS: ClassVar = {
        "service_url": "which cluster",
        "host": "the network",
        "auto_create": "topics that do not exist",
        "tail_bytes": "memory",
        "message_bytes_max": "messages",
        "consumer_unacked_max": "consumers that share a subscription",
        "ack_receipt": "acknowledgements",
        "roll_bytes": "when a live ledger is followed by another: whichever comes first",
    }
    """The headings of conf/broker.toml, each above the setting with this name."""

    service_url: str = Field(
        DEFAULT_SERVICE_URL,
        description="Which cluster to serve: zk://host:port[,host:port...]/root.",
    )
    session_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Without contact for this long, ZooKeeper removes the broker from the list.",
    )

    host: str = Field("127.0.0.1", description="The address it listens on.")
    broker_port: int = Field(
        6650, ge=0, le=PORT_MAX, description="Where Pulsar's clients connect; 0: a free port."
    )
    admin_port: int = Field(
        8080,
        ge=0,
        le=PORT_MAX,
        description="Where it answers lookups and the admin API by HTTP; 0: a free port.",
    )
    advertised_host: str = Field(
        "", description="The host that clients connect to; empty: as in host."
    )
    admin_open: bool = Field(
        False,
        description="Let other machines change topics, namespaces and subscriptions by HTTP."
        " There are no rights yet: every program that reaches the port may do it.",
    )
    admin_hosts: str = Field(
        "",
        description="Other host names by which it is asked by HTTP, separated by commas: requests"
        " for other hosts are refused.",
    )
    cluster: str = Field("standalone", description="The cluster's name in the admin API.")

    auto_create: bool = Field(
        True, description="Make a topic that a client names and that does not exist."
    )
    auto_create_partitions: int = Field(
        0, ge=0, description="How many partitions it gets; 0: it is not partitioned."
    )

    tail_bytes: int = Field(
        64 * MIB, gt=0, description="Newest messages kept in memory, for consumers at the end."
    )

    message_bytes_max: int = Field(
        MESSAGE_BYTES_MAX,
        ge=64 << 10,
        le=MESSAGE_BYTES_MAX,
        description="Largest message that it takes, without metadata; clients cut larger ones into"
        " chunks, or refuse them.",
    )
    backlog_look_s: float = Field(
        60.0, gt=0, description="How often backlog quotas and expiry are judged."
    )

    consumer_unacked_max: int = Field(
        50_000,
        ge=0,
        description="Messages that a consumer may have without acknowledging them; 0: no limit.",
    )
    subscription_unacked_max: int = Field(
        200_000,
        ge=0,
        description="And all its consumers of a partition together.",
    )

    ack_receipt: Literal["durable", "memory"] = Field(
        "durable",
        description="When a client that asks gets the receipt of an acknowledgement: once it is"
        " stored as a message is, or (memory) once the broker knows it.",
    )

    roll_bytes: int = Field(1024 * MIB, gt=0, description="Size of a live ledger.")
    roll_entries: int = Field(1_000_000, gt=0, description="Entries of a live ledger.")
    roll_age_s: float = Field(
        float(OWN_ROLL_S_MAX),
        gt=0,
        le=OWN_ROLL_S_MAX,
        description="Age of a live ledger; maintenance fences an older one as abandoned.",
    )
    roll_entries_read: int = Field(
        20_000,
        gt=0,
        description="Of a topic with deduplication: entries of a live segment, all of which the"
        " next owner reads.",
    )
    roll_bytes_read: int = Field(
        32 * MIB, gt=0, description="Of a topic with deduplication: bytes of a live segment."
    )


DEFAULTS = load(BrokerSettings)
