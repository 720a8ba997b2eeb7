"""Which partition a row goes to: by its key's hash; without a key, where its task's rows go.

Always true: the hash is murmur3 (x86, 32 bit, seed 0) of the key's bytes, partition = (hash &
0x7fffffff) % partitions, the same in every language and for ever: it decides where a key's rows
are. Whole columns are hashed by numpy, one step for all rows that have so many bytes; no Python
loop runs over rows but for the few that are far longer than the rest.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_MASK = 0xFFFFFFFF
FEW_ROWS = 16  # fewer are hashed one by one: a numpy step costs as much as 16 Python steps

Hashes = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


def partitions_of(keys: pa.Array, partitions: int, sticky: int) -> Counts:
    """The partition of each row of the binary column `keys`; null keys go to `sticky`."""
    hashed = (murmur3_32(keys) & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    if keys.null_count:
        hashed[np.asarray(keys.is_null())] = sticky
    return hashed


def murmur3_32(keys: pa.Array) -> Hashes:
    """The hash of each value of a binary column; for null that of the empty value."""
    starts, lengths, content = _layout(keys)
    hashes = np.zeros(len(keys), dtype=np.uint32)
    with np.errstate(over="ignore"):
        _mix_blocks(hashes, starts, lengths, content)
        _mix_tails(hashes, starts, lengths, content)
        return _finish(hashes ^ lengths.astype(np.uint32))


def murmur3_32_of(key: bytes, hashed: int = 0, first_block: int = 0) -> int:
    """The hash after the whole blocks of `key`, from block `first_block` on: for one long key."""
    words = np.frombuffer(key, dtype="<u4", count=len(key) // 4)[first_block:]
    for word in words.tolist():
        mixed = (word * 0xCC9E2D51) & _MASK
        mixed = ((mixed << 15 | mixed >> 17) * 0x1B873593) & _MASK
        hashed ^= mixed
        hashed = (hashed << 13 | hashed >> 19) & _MASK
        hashed = (hashed * 5 + 0xE6546B64) & _MASK
    return hashed


def _layout(keys: pa.Array) -> tuple[Counts, Counts, Bytes]:
    """Where each value starts, how long it is (null: 0), and the bytes they are in."""
    _, offset_buffer, content = keys.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[keys.offset :][: len(keys) + 1]
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    if keys.null_count:
        lengths[np.asarray(keys.is_null())] = 0
    if content is None:
        return starts, lengths, np.zeros(0, dtype=np.uint8)
    return starts, lengths, np.frombuffer(content, dtype=np.uint8)


def _mix_blocks(hashes: Hashes, starts: Counts, lengths: Counts, content: Bytes) -> None:
    """Mix in the whole 4-byte blocks, block by block over the rows that have it."""
    blocks = lengths // 4
    rows = np.flatnonzero(blocks)
    words = _words(content)
    at = 0
    while len(rows) > FEW_ROWS:
        block = words[starts[rows] + 4 * at]
        mixed = hashes[rows] ^ _scramble(block)
        hashes[rows] = _rotate(mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        at += 1
        rows = rows[blocks[rows] > at]
    for row in rows.tolist():
        start = int(starts[row])
        key = content[start : start + int(lengths[row])].tobytes()
        hashes[row] = murmur3_32_of(key, int(hashes[row]), at)


def _mix_tails(hashes: Hashes, starts: Counts, lengths: Counts, content: Bytes) -> None:
    """Mix in the last 1 to 3 bytes of the rows that have such a rest."""
    rest = lengths % 4
    tails = starts + lengths - rest
    block = np.zeros(len(hashes), dtype=np.uint32)
    for i in (2, 1, 0):
        rows = np.flatnonzero(rest > i)
        block[rows] ^= content[tails[rows] + i].astype(np.uint32) << np.uint32(8 * i)
    hashes ^= _scramble(block)  # 0 for rows without a rest


def _words(content: Bytes) -> npt.NDArray[np.uint32]:
    """A view of the bytes as little-endian 32-bit words, one beginning at each byte."""
    count = max(0, len(content) - 3)
    return np.ndarray(count, dtype="<u4", buffer=content.data, strides=(1,))


def _scramble(block: Hashes) -> Hashes:
    return _rotate(block * _C1, 15) * _C2


def _rotate(value: Hashes, bits: int) -> Hashes:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _finish(value: Hashes) -> Hashes:
    value ^= value >> np.uint32(16)
    value *= np.uint32(0x85EBCA6B)
    value ^= value >> np.uint32(13)
    value *= np.uint32(0xC2B2AE35)
    return value ^ (value >> np.uint32(16))
