"""What the pages on options have to contain, by the table of options."""

from spark_ledger.spark.options.table import Option, Use

KAFKAS_TOO = (
    *("subscribe", "subscribePattern", "assign", "topic", "includeHeaders", "failOnDataLoss"),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *("startingOffsetsByTimestampStrategy", "minPartitions", "maxRecordsPerPartition"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
)
"""Options of Spark's Kafka source and sink that have the same name here, the others being in
KAFKA_REMEDIES."""


def as_markdown(options: tuple[Option, ...]) -> str:
    """The table of docs/spark.md."""
    lines = [
        f"| {_names(option)} | {_default(option)} | {_only(option)}{option.meaning} |"
        for option in options
    ]
    return "\n".join(lines) + "\n"


def _names(option: Option) -> str:
    return " or ".join(f"`{name}`" for name in option.names if name != "path")


def _default(option: Option) -> str:
    return option.default_in_docs or (f"`{option.default}`" if option.default else "none")


def _only(option: Option) -> str:
    if len(option.uses) > 1:
        return ""
    return (
        "batch only: " if option.uses[0] in (Use.BATCH_READ, Use.BATCH_WRITE) else "stream only: "
    )
