"""Tokens derived from a ledger's password: one to read, one to add, one to fence and recover.

Always true: a ledger's record holds verifiers only, from which no token can be computed; without
a password there are no verifiers and any token (the empty one) is good. Whoever may recover may
also read and add: recovery writes back what it reads.
"""

import hashlib
import hmac
from dataclasses import dataclass

from spark_ledger.metadata.ledger_record import Verifiers


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a client sends with its requests; empty for a ledger without password."""

    read: bytes = b""
    add: bytes = b""
    recover: bytes = b""


def derive(password: bytes) -> Tokens:
    """The three tokens of a password; all empty for the empty password."""
    if not password:
        return Tokens()
    return Tokens(*(hmac.digest(password, use, "sha256") for use in (b"read", b"add", b"recover")))


def verifiers(tokens: Tokens) -> Verifiers | None:
    """What the ledger's record keeps of the tokens."""
    if not tokens.recover:
        return None
    return Verifiers(*(_digest(token) for token in (tokens.read, tokens.add, tokens.recover)))


def allows(known: Verifiers | None, use: str, token: bytes) -> bool:
    """Whether `token` may be used for `use`: "read", "add" or "recover"."""
    if known is None:
        return True
    accepted = [known.recover, getattr(known, use)]
    return any(hmac.compare_digest(_digest(token), verifier) for verifier in accepted)


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()
