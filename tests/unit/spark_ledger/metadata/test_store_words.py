"""What an error says of the metadata store: one that is silent is not one that refuses."""

import pytest

from spark_ledger.errors import Unavailable
from spark_ledger.metadata.store import (
    MultiFailed,
    NoNode,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
)
from spark_ledger.metadata.store_calls import unavailable_while


@pytest.mark.parametrize("error", [StoreUnavailable("late"), OutcomeUnknown("the answer was lost")])
def test_a_store_that_is_silent_did_not_answer(error: StoreError):
    with pytest.raises(Unavailable, match="did not answer while opening a topic"):  # noqa: SIM117
        with unavailable_while("opening a topic"):
            raise error


@pytest.mark.parametrize(
    "error", [NoNode("/topics"), MultiFailed(0, NoNode("/head")), StoreError("no rights")]
)
def test_a_store_that_answers_with_a_refusal_is_not_called_silent(error: StoreError):
    with pytest.raises(Unavailable, match="refused a request while opening a topic") as caught:  # noqa: SIM117
        with unavailable_while("opening a topic"):
            raise error
    assert "did not answer" not in str(caught.value)
    assert "backup" in caught.value.remedy
