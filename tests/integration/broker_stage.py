"""Several brokers, each a process, over the bookies of one cluster."""

import pulsar

from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.topic import blocking

PARTITIONS = 16  # that all fall on one of two brokers happens to nobody


class Stage:
    """Two brokers and a topic whose partitions both of them have."""

    def __init__(self, cluster, brokers, name):
        self.first, self.other, self.name = *brokers, name
        self.topics = blocking.topics(cluster.service_url)
        self.info = self.topics.run(self.topics.client.topics.create(name, PARTITIONS))
        self._ownership = Ownership(self.topics.client.store, "nobody", "")

    @property
    def hosts(self):
        return f"{self.first.url},{self.other.url.removeprefix('pulsar://')}"

    def owners(self):
        """By partition the broker's URL."""
        owners = self.topics.run(self._ownership.owners(self.info.id, fresh=True))
        return {p: one.url for p in range(PARTITIONS) if (one := owners.of(p)) is not None}

    def positions(self, subscription):
        return self.topics.run(
            self.topics.client.subscriptions.positions(self.info.id, subscription)
        )

    def send(self, client, count, first=0):
        """Messages first, first + 1, ... round the partitions; each has its receipt."""
        producer = client.create_producer(
            self.name, message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution
        )
        for i in range(first, first + count):
            producer.send(b"%d" % i)
        producer.close()
