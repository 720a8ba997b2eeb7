"""A session of Spark that a caller hands over, checked at the door."""

from pyspark.sql import SparkSession

from spark_ledger.errors import OptionInvalid


def check_session(spark: object) -> None:
    """Raises OptionInvalid for what is no session, of Spark itself or of Spark Connect."""
    if not isinstance(spark, SparkSession) and type(spark).__name__ != "SparkSession":
        raise OptionInvalid(
            f"spark is {spark!r}, no SparkSession", "Give the session: SparkSession.active()."
        )
