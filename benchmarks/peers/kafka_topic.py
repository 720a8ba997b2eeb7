"""Creates a Kafka topic on the brokers of peers.sh (extra `bench`: confluent-kafka)."""

import sys

BROKER = "127.0.0.1:9092"


def create(name: str, partitions: int, replication: int) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    client = AdminClient({"bootstrap.servers": BROKER})
    for outcome in client.create_topics([NewTopic(name, partitions, replication)]).values():
        outcome.result()


if __name__ == "__main__":
    create(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
