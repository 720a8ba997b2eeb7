"""The HTTP status of each error: admin clients recognise an error by its status."""

from http import HTTPStatus

from spark_ledger import errors
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.wire.commands import Refusal, ServerError

TEXT_MAX = 1000
_STATUS: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (errors.TopicNotFound, HTTPStatus.NOT_FOUND),
    (errors.TopicDeleted, HTTPStatus.NOT_FOUND),
    (errors.NamespaceNotFound, HTTPStatus.NOT_FOUND),
    (errors.SubscriptionNotFound, HTTPStatus.NOT_FOUND),
    (errors.TopicExists, HTTPStatus.CONFLICT),
    (errors.NamespaceExists, HTTPStatus.CONFLICT),
    (errors.NamespaceInUse, HTTPStatus.CONFLICT),
    (errors.SubscriptionExists, HTTPStatus.CONFLICT),
    (errors.SubscriptionBusy, HTTPStatus.PRECONDITION_FAILED),
    (errors.TopicNameInvalid, HTTPStatus.PRECONDITION_FAILED),
    (errors.OptionInvalid, HTTPStatus.PRECONDITION_FAILED),
    (errors.OffsetsOutOfRange, HTTPStatus.PRECONDITION_FAILED),
    (errors.SchemaUnreadable, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.BadConfig, HTTPStatus.PRECONDITION_FAILED),
    (errors.CommitContended, HTTPStatus.CONFLICT),
    (errors.LedgerError, HTTPStatus.SERVICE_UNAVAILABLE),
)
_REMEDIES: dict[type[Exception], str] = {
    errors.SubscriptionNotFound: "Correct the name, or create it with PUT .../subscription/{name}.",
    errors.SubscriptionBusy: (
        "Stop the query or close the consumers that use it; DELETE .../subscription/{name} with"
        " force=true deletes it under connected consumers."
    ),
}
"""What a program does by HTTP, in place of the commands that the errors themselves name."""
_STATUS_OF_CODE = {
    ServerError.TOPIC_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ServerError.SUBSCRIPTION_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ServerError.NOT_ALLOWED: HTTPStatus.PRECONDITION_FAILED,
    ServerError.SERVICE_NOT_READY: HTTPStatus.SERVICE_UNAVAILABLE,
}


def refusal_of(error: Exception) -> HttpRefusal | None:
    """The refusal that an error becomes; None: the error is a defect of the broker."""
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, Refusal):
        status = _STATUS_OF_CODE.get(error.code, HTTPStatus.PRECONDITION_FAILED)
        return HttpRefusal(status, error.message)
    for kind, status in _STATUS:
        if isinstance(error, kind):
            if isinstance(error, errors.LedgerError) and type(error) in _REMEDIES:
                error = type(error)(error.what, _REMEDIES[type(error)])
            return HttpRefusal(status, str(error))
    return None
