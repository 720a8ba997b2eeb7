"""What a bookie's response means. Always true: only NO_SUCH_ENTRY and NO_SUCH_LEDGER are negatives.

Recovery is safe because it never mixes three classes of response (docs/protocol.md): a *positive*
carries data with a valid digest; a *negative* means "I never acknowledged it"; every other response
is *unknown*. A bookie that may have had the entry responds *unknown*. Recovery's reads treat one
kind of *unknown*, LIMBO_TORN, as a class of its own (`recovery_meaning`).
"""

from enum import Enum, IntEnum


class Status(IntEnum):
    """The status of one add, one entry of a read, or one request. Numbers equal bookie.proto's."""

    OK = 0
    NO_SUCH_ENTRY = 1
    NO_SUCH_LEDGER = 2
    FENCED = 3
    UNAUTHORIZED = 4
    WRONG_BOOKIE = 5
    BUSY = 6
    READ_ONLY = 7
    IO_ERROR = 8
    LIMBO = 9
    BAD_DIGEST = 10
    CONFLICTING_ENTRY = 11
    TOO_LARGE = 12
    BAD_REQUEST = 13
    LEDGER_DELETED = 14
    SHUTTING_DOWN = 15
    METADATA_UNAVAILABLE = 16
    LIMBO_TORN = 17


class Meaning(Enum):
    """The class of a response, as recovery and readers see it."""

    POSITIVE = "positive"
    NEGATIVE = "negative"
    UNKNOWN = "unknown"
    TORN = "torn"
    """Unknown only because the bookie has the ledger in torn limbo; see `recovery_meaning`."""


_NEGATIVES = frozenset({Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER})


def meaning(status: Status) -> Meaning:
    """The class of a read's status: OK is positive, explicit absence negative, the rest unknown."""
    if status is Status.OK:
        return Meaning.POSITIVE
    return Meaning.NEGATIVE if status in _NEGATIVES else Meaning.UNKNOWN


def recovery_meaning(status: Status) -> Meaning:
    """The class of an entry's status for recovery, which separates TORN from other unknowns."""
    return Meaning.TORN if status is Status.LIMBO_TORN else meaning(status)


class StopReason(IntEnum):
    """Why a read of a range ended where it did. Numbers equal bookie.proto's."""

    END_OF_RANGE = 0
    BYTE_LIMIT = 1
    REST_IS_ABSENT = 2
