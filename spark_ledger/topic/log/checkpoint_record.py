"""The record at /topic-ids/<id>/checkpoint: which checkpoint counts, and what is left of the log.

Always true: `trimmed` <= `previous` < `next`; `next` and `trimmed` only rise; commits with a number
from `trimmed` on are in the log, those below are not. A root of 64 KiB at most is in the record
itself, a larger one is a blob. The root before it is named as long as the log goes back to it, so
that a root which cannot be read is not the end of the topic.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bookie_server.api.entry import payload_crc
from spark_ledger import errors
from spark_ledger.topic.log.intervals import BlobPointer
from spark_ledger.topic.log.records import FIRST_VERSION, READER_VERSION, pointer_from_json

ROOT_INLINE_BYTES_MAX = 64 * 1024
StoredRoot = bytes | BlobPointer
"""An encoded root (checkpoint.py), or where it is."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """`next` is the number of the first commit that the root does not have, `previous` that of the
    checkpoint before (0: there was none), `previous_root` its root (None: there was none, or this
    one's is in the record and cannot be lost apart from it). `intent` made it."""

    next: int
    root: StoredRoot
    previous: int = 0
    previous_root: StoredRoot | None = None
    trimmed: int = 0
    intent: str = ""

    def root_ledgers(self) -> list[int]:
        """The ledgers that the roots are in."""
        roots = (self.root, self.previous_root)
        return [one.ledger_id for one in roots if isinstance(one, BlobPointer)]


def following(
    before: CheckpointRecord | None, next_: int, root: StoredRoot, intent: str
) -> CheckpointRecord:
    """The record that takes the place of `before`. ValueError if it would go back (hazard 6)."""
    if before is None:
        return CheckpointRecord(next_, root, intent=intent)
    if next_ <= before.next:
        raise ValueError(f"a checkpoint up to commit {next_} does not follow one to {before.next}")
    kept = before.root if isinstance(root, BlobPointer) else None
    return CheckpointRecord(next_, root, before.next, kept, before.trimmed, intent)


def encode(record: CheckpointRecord) -> bytes:
    plain: dict[str, Any] = {
        "min_reader": FIRST_VERSION,
        "min_writer": FIRST_VERSION,
        "next": record.next,
        "previous": record.previous,
        "trimmed": record.trimmed,
        "intent": record.intent,
        "root": _root_json(record.root),
        "previous_root": None if record.previous_root is None else _root_json(record.previous_root),
    }
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def decode(value: bytes) -> CheckpointRecord:
    """Raises errors.UnsupportedFormat."""
    try:
        plain = json.loads(value)
        if int(plain["min_reader"]) > READER_VERSION:
            raise errors.UnsupportedFormat(
                f"a checkpoint needs reader version {plain['min_reader']}, this is version"
                f" {READER_VERSION}"
            )
        before = plain["previous_root"]
        return CheckpointRecord(
            next=int(plain["next"]),
            root=_root_from_json(plain["root"]),
            previous=int(plain["previous"]),
            previous_root=None if before is None else _root_from_json(before),
            trimmed=int(plain["trimmed"]),
            intent=plain["intent"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.UnsupportedFormat(f"not a checkpoint: {error!r}") from error


def _root_json(root: StoredRoot) -> dict[str, Any]:
    if isinstance(root, BlobPointer):
        return asdict(root)
    return {"inline": b64encode(root).decode(), "crc": payload_crc([root])}


def _root_from_json(plain: Mapping[str, Any]) -> StoredRoot:
    if "inline" not in plain:
        return pointer_from_json(plain)
    root = b64decode(plain["inline"], validate=True)
    if payload_crc([root]) != plain["crc"]:
        raise ValueError("the root has another checksum than the record says")
    return root
