"""What is done to a node, in four bytes for each operation.

Always true: any bytes are a case: the first four say what the node is made of, every further four
are one operation; zeros are the simplest of all, so that what hypothesis shrinks becomes simple.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

LEDGERS = range(1, 4)
OPERATION_BYTES = 4

Kind = Literal[
    "add",
    "clear",
    "drop",
    "read",
    "fence",
    "lac",
    "wait",
    "flush",
    "crash",
    "stop",
    "delete",
    "fail",
    "grow",
    "lose",
]
_WEIGHTS: dict[Kind, int] = {
    "add": 122,
    "clear": 9,
    "drop": 5,
    "read": 30,
    "lac": 10,
    "fence": 6,
    "wait": 30,
    "flush": 20,
    "crash": 8,
    "stop": 4,
    "delete": 5,
    "fail": 3,
    "grow": 2,
    "lose": 2,
}
KINDS: tuple[Kind, ...] = tuple(kind for kind, weight in _WEIGHTS.items() for _ in range(weight))
assert len(KINDS) == 256
WAITS_S = (0.0, 0.0004, 0.001, 0.002, 0.006, 0.05, 5.5, 16.0)
PAUSES_S = (None, None, None, 0.0, 0.0004, 0.001, 0.003, 0.02)
KEEPS: tuple[Literal["random", "all", "none"], ...] = ("random",) * 5 + ("all", "all", "none")


class Operation(NamedTuple):
    """`a`, `b` and `c` are bytes that the kind reads as it needs."""

    kind: Kind
    a: int
    b: int
    c: int

    @property
    def ledger_id(self) -> int:
        return LEDGERS[self.a % 4 % len(LEDGERS)]

    @property
    def pause_s(self) -> float | None:
        """How long nothing else is begun; None: the next operation comes in the same moment."""
        return PAUSES_S[self.a >> 5]

    @property
    def seed(self) -> int:
        return self.b << 8 | self.c

    def __str__(self) -> str:
        return f"{self.kind}({self.a}, {self.b}, {self.c})"


def operations(case: bytes) -> Iterator[Operation]:
    """The operations of a case; an incomplete last one is none."""
    for at in range(OPERATION_BYTES, len(case) - OPERATION_BYTES + 1, OPERATION_BYTES):
        kind, a, b, c = case[at : at + OPERATION_BYTES]
        yield Operation(KINDS[kind], a, b, c)
