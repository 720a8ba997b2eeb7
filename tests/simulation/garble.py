"""Copies that arrive damaged: a bit of an entry is flipped in the answer to a read.

Always true: nothing but an entry's own bytes is touched, for they carry CRCs of their own; what
else a message says is the transport's to protect.
"""

import random

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.status import Status


def garble(method: str, answer: bytes, rng: random.Random) -> bytes:
    """The answer with one bit of one of its entries flipped; as it is if it brings none."""
    response = codec.decode_response(method, answer)
    if not isinstance(response, m.ReadResponse):
        return answer
    results = list(response.results)
    whole = [at for at, result in enumerate(results) if len(result.entry)]
    if not whole:
        return answer
    at = rng.choice(whole)
    entry = bytearray(results[at].entry)
    entry[rng.randrange(len(entry))] ^= 1 << rng.randrange(8)
    results[at] = m.EntryResult(Status.OK, bytes(entry))
    return bytes(codec.encode(response._replace(results=results)))
