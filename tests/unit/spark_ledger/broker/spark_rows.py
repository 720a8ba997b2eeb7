"""Batches of rows of Spark, and a partition that has them."""

from spark_ledger.broker.log.tail import Stored
from spark_ledger.topic.entry import pulsar_batch
from tests.unit.spark_ledger.broker.consumers import Batches


def of_spark(count, offset=0):
    single = pulsar_batch.SingleMessageMetadata
    metadata = pulsar_batch.MessageMetadata(
        producer_name=pulsar_batch.PRODUCER,
        sequence_id=offset,
        publish_time=5,
        num_messages_in_batch=count,
    )
    payload = b""
    for row in range(offset, offset + count):
        value = b"v%d" % row
        head = single(partition_key=f"k{row}", payload_size=len(value)).SerializeToString()
        payload += len(head).to_bytes(4, "big") + head + value
    return Stored(offset, count, pulsar_batch.build_batch(metadata, payload), True)


def partition_of(*batches):
    partition = Batches()
    partition.stored = list(batches)
    partition.end = batches[-1].end
    return partition
