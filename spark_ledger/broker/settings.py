"""Every setting of a broker, with its default and meaning; conf/broker.toml lists them."""

from typing import ClassVar, Literal

from pydantic import Field

from bookie_server.api.settings import DEFAULT_SERVICE_URL, Settings, load
from spark_ledger.broker.wire.frames import MESSAGE_BYTES_MAX
from spark_ledger.net import PORT_MAX
from spark_ledger.topic.log.policies import ROLL_AGE_S_MAX

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
        "ack_bytes_max": "acknowledgements",
        "roll_bytes": "when the next live ledger begins: at the limit that is reached first",
    }
    """The headings of conf/broker.toml, by the first setting below the heading."""

    service_url: str = Field(
        DEFAULT_SERVICE_URL,
        description="Which cluster to serve: zk://host:port[,host:port...]/root.",
    )
    session_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Without contact for this long, ZooKeeper removes the broker's registration.",
    )

    host: str = Field("127.0.0.1", description="The address on which the broker listens.")
    broker_port: int = Field(
        6650, ge=0, le=PORT_MAX, description="The port for Pulsar's clients; 0: a free port."
    )
    admin_port: int = Field(
        8080,
        ge=0,
        le=PORT_MAX,
        description="The port for lookups and the admin API, both by HTTP; 0: a free port.",
    )
    advertised_host: str = Field(
        "", description="The host to which clients connect; empty: the value of host."
    )
    admin_open: bool = Field(
        False,
        description="Let other machines change topics, namespaces and subscriptions by HTTP."
        " There are no rights yet: every program that reaches the port may make such changes.",
    )
    admin_hosts: str = Field(
        "",
        description="Further names by which HTTP requests may address the broker, separated by"
        " commas; a request for another host is refused.",
    )
    cluster: str = Field("standalone", description="The cluster's name in the admin API.")

    auto_create: bool = Field(
        True, description="Make a topic that a client names and that does not exist."
    )
    auto_create_partitions: int = Field(
        0, ge=0, description="How many partitions such a topic gets; 0: it is not partitioned."
    )

    tail_bytes: int = Field(
        64 * MIB, gt=0, description="Memory for the newest messages, for consumers at the end."
    )

    message_bytes_max: int = Field(
        MESSAGE_BYTES_MAX,
        ge=64 << 10,
        le=MESSAGE_BYTES_MAX,
        description="Largest message that the broker takes, without metadata; clients cut larger"
        " messages into chunks, or refuse them.",
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
        description="Messages that all consumers of a subscription may have of one partition"
        " without acknowledging them; 0: no limit.",
    )

    ack_bytes_max: int = Field(
        64 * MIB,
        gt=0,
        description="Memory of the sets of acknowledged and of waiting messages of all"
        " subscriptions. When it is full, a subscription with gaps sends no new messages until its"
        " gaps are acknowledged.",
    )
    subscription_ack_bytes_max: int = Field(
        16 * MIB, gt=0, description="The same limit for one subscription at a broker."
    )
    delay_bytes_max: int = Field(
        256 * MIB,
        gt=0,
        description="Memory of the times of delayed messages, 32 bytes each. When it is full, the"
        " subscriptions of a partition with more than 512 delayed messages read no further until"
        " some of these are due.",
    )

    ack_receipt: Literal["durable", "memory"] = Field(
        "durable",
        description="When a client that asks for a receipt of an acknowledgement gets the receipt."
        " durable: after the acknowledgement is stored like a message. memory: as soon as the"
        " broker has the acknowledgement.",
    )

    roll_bytes: int = Field(1024 * MIB, gt=0, description="Size of a live ledger.")
    roll_entries: int = Field(1_000_000, gt=0, description="Entries of a live ledger.")
    roll_age_s: float = Field(
        float(ROLL_AGE_S_MAX),
        gt=0,
        le=ROLL_AGE_S_MAX,
        description="Age of a live ledger; maintenance fences an older ledger as abandoned.",
    )
    roll_entries_read: int = Field(
        20_000,
        gt=0,
        description="For a topic with deduplication: entries of a live segment. The next owner of"
        " the partition reads all of them.",
    )
    roll_bytes_read: int = Field(
        32 * MIB, gt=0, description="For a topic with deduplication: bytes of a live segment."
    )


DEFAULTS = load(BrokerSettings)
