"""Places in a topic as a user of the command line types them."""

from datetime import datetime
from typing import TYPE_CHECKING

from spark_ledger.errors import BadConfig

if TYPE_CHECKING:
    from spark_ledger.topic.subscription.seek_target import SeekTarget


def target_of(to: str | None, offsets: list[str]) -> "SeekTarget":
    """`earliest`, `latest` or a time, or PARTITION=OFFSET texts. Raises errors.BadConfig unless it
    is exactly one of both."""
    from spark_ledger.topic.subscription.seek_target import CommittedSince, End

    if bool(offsets) == (to is not None):
        raise BadConfig("it is not said where to", "Give either --to or --to-offset.")
    if to is None:
        return offsets_of(offsets)
    if to in (one.value for one in End):
        return End(to)
    return CommittedSince(time_ms(to))


def offsets_of(texts: list[str]) -> dict[int, int]:
    """PARTITION=OFFSET texts. Raises errors.BadConfig."""
    try:
        pairs = [one.split("=") for one in texts]
        return {int(partition): int(offset) for partition, offset in pairs}
    except ValueError as error:
        raise BadConfig(
            f"{' '.join(texts)} is no place in a topic", "Give PARTITION=OFFSET, e.g. 0=1200."
        ) from error


def time_ms(text: str) -> int:
    """ISO 8601 (local time, if no offset is said) or milliseconds. Raises errors.BadConfig."""
    if text.isdecimal():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadConfig(
            f"'{text}' is no time", "Give ISO 8601, e.g. 2026-01-31T12:00:00Z, or milliseconds."
        ) from error
    return round((at if at.tzinfo else at.astimezone()).timestamp() * 1000)
