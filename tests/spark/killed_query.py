"""A query in a driver of its own, which stands still in its batch until its process is killed."""

import json
import sys
import time

from pyspark.sql import SparkSession


def main(service_url: str, topic: str, checkpoint: str, seen: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    options = {"serviceUrl": service_url, "startingSubscription": "theirs"}

    def stand_still(batch, _):
        rows = [bytes(row.value).decode() for row in batch.collect()]
        with open(seen, "w", encoding="utf-8") as file:
            file.write(json.dumps(rows) + "\n")
        time.sleep(600)

    stream = spark.readStream.format("ledger").options(**options, maxOffsetsPerTrigger="3000")
    write = stream.load(topic).writeStream.foreachBatch(stand_still)
    write.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
