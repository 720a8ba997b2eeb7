"""Every error a user can meet, by what the caller does next.

The text is made once, here: `[LEDGER_X.Y] what is wrong, with the value. Remedy.` Facts are
fields. Errors of kazoo, grpc and the operating system never leave the file that owns them.
"""


class LedgerError(Exception):
    """Base of all errors of Spark Ledger. `error_class` is stable and listed in docs/errors.md."""

    error_class = "LEDGER.INTERNAL"
    sql_state = "XX000"
    remedy = "Report this with the log."

    def __init__(self, what: str, remedy: str | None = None, **facts: object) -> None:
        self.what = what.rstrip(".")
        self.facts = facts
        if remedy is not None:
            self.remedy = remedy
        super().__init__(f"[{self.error_class}] {self.what}. {self.remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.remedy, self.facts)


def _rebuild(kind: type[LedgerError], what: str, remedy: str, facts: dict[str, object]) -> object:
    return kind(what, remedy, **facts)


# -- try again -------------------------------------------------------------------------------


class Unavailable(LedgerError):
    """The metadata store or the bookies cannot be reached now."""

    error_class = "LEDGER_UNAVAILABLE"
    sql_state = "08001"
    remedy = "Check that the cluster is up (`spark-ledger status`) and the service URL is right."


class NotEnoughBookies(LedgerError):
    """Fewer bookies answer than the quorum needs. Nothing was acknowledged."""

    error_class = "LEDGER_WRITE.NOT_ENOUGH_BOOKIES"
    sql_state = "53000"
    remedy = "Start the missing bookies or write with a smaller ensemble."


class TimedOut(LedgerError):
    """An operation did not end in its time; an append may or may not have been stored."""

    error_class = "LEDGER_WRITE.TIMEOUT"
    sql_state = "08006"
    remedy = "Look whether the rows are there before writing them again."


# -- outcome unknown: look before repeating ---------------------------------------------------


class CommitOutcomeUnknown(LedgerError):
    """A commit was sent and nobody can say whether it was applied. Replaying it is safe."""

    error_class = "LEDGER_WRITE.OUTCOME_UNKNOWN"
    sql_state = "08007"
    remedy = "Run the same batch again from its checkpoint: it is committed once."


# -- the handle is dead -----------------------------------------------------------------------


class Fenced(LedgerError):
    """Somebody else took over: this writer can add nothing any more."""

    error_class = "LEDGER_WRITE.FENCED"
    sql_state = "40001"
    remedy = "Another run has taken over; stop this one."


class LedgerClosed(LedgerError):
    """The ledger is closed: nothing can be added."""

    error_class = "LEDGER_WRITE.CLOSED"
    sql_state = "55019"
    remedy = "Create a new ledger."


# -- not there --------------------------------------------------------------------------------


class NoSuchLedger(LedgerError):
    error_class = "LEDGER_DATA_LOSS.LEDGER_MISSING"
    sql_state = "22000"
    remedy = "It was deleted, or the service URL names another cluster."


class NoSuchEntry(LedgerError):
    """An entry beyond the end of a closed ledger, or beyond what is confirmed, was asked for."""

    error_class = "LEDGER_OFFSETS.OUT_OF_RANGE"
    sql_state = "22003"
    remedy = "Read up to last_add_confirmed."


class DataUnavailable(LedgerError):
    """A confirmed entry cannot be read now: its bookies are down or answer 'unknown'."""

    error_class = "LEDGER_UNAVAILABLE"
    sql_state = "08001"
    remedy = "Start the bookies named; confirmed data is never given up."


# -- the data or the request is bad -----------------------------------------------------------


class DigestMismatch(LedgerError):
    error_class = "LEDGER_DATA_LOSS.CHECKSUM"
    sql_state = "22000"
    remedy = "Every copy of the entry is damaged; restore the bookies' disks."


class Unauthorized(LedgerError):
    error_class = "LEDGER_WRITE.UNAUTHORIZED"
    sql_state = "28000"
    remedy = "Give the ledger's password."


class MessageTooBig(LedgerError):
    error_class = "LEDGER_WRITE.MESSAGE_TOO_BIG"
    sql_state = "54000"
    remedy = "Make the row smaller or raise entry_bytes_max on bookies and clients."


class BadConfig(LedgerError):
    error_class = "LEDGER_CONFIG.INVALID"
    sql_state = "22023"
    remedy = "Correct the setting; conf/ lists every one with its meaning."
