"""The three tokens of a password, and who may do what with which."""

import itertools

import pytest

from spark_ledger.metadata import ledger_record
from spark_ledger.metadata.ledger_record import (
    Fragment,
    LedgerRecord,
    Tokens,
    allows,
    derive,
    verifiers,
)

USES = ("read", "add", "recover")
GOOD, OTHER = derive(b"secret"), derive(b"guess")
MAY = {"read": ("read",), "add": ("add",), "recover": USES}  # token: what it is good for


@pytest.mark.parametrize(("token", "use"), list(itertools.product(USES, USES)))
def test_a_token_is_good_for_its_own_use_and_that_of_recovery_for_all(token, use):
    assert allows(verifiers(GOOD), use, getattr(GOOD, token)) is (use in MAY[token])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "token", [b"", b"secret", OTHER.read, OTHER.add, OTHER.recover, b"x" * 10_000]
)
def test_no_other_token_is_good_for_anything(use, token):
    assert not allows(verifiers(GOOD), use, token)


@pytest.mark.parametrize("use", USES)
def test_without_a_password_any_token_is_good(use):
    assert verifiers(derive(b"")) is None
    assert derive(b"") == Tokens()
    assert allows(None, use, b"")
    assert allows(None, use, GOOD.add)


def test_the_record_holds_nothing_that_is_good_for_anything():
    kept = verifiers(GOOD)
    record = LedgerRecord(7, 1, 1, 1, (Fragment(0, ("a",)),), verifiers=kept)
    text = ledger_record.encode(record)
    for token in (GOOD.read, GOOD.add, GOOD.recover):
        assert token not in text
        assert token.hex().encode() not in text
    for word in (kept.read, kept.add, kept.recover):
        for use in USES:
            assert not allows(kept, use, word.encode())
            assert not allows(kept, use, bytes.fromhex(word))


def test_the_tokens_of_a_password_are_the_same_everywhere_and_differ_from_each_other():
    assert derive(b"secret") == GOOD
    assert len({GOOD.read, GOOD.add, GOOD.recover, OTHER.read, OTHER.add, OTHER.recover}) == 6
