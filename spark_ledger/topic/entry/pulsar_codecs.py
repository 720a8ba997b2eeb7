"""The codecs of Pulsar's batches: the size that compressed bytes show; decompression. Pure.

Always true: the size that a batch's metadata declares is compared first with the size that the
compressed bytes show, and then with the decompressed bytes; `decompress` returns exactly the
declared size. The formats: Snappy's bytes begin with the decompressed size; a ZSTD frame mostly has
the size; an LZ4 block and ZLIB do not have it.
"""

import struct
import zlib

import pyarrow as pa

from spark_ledger import errors

KINDS = range(5)
NONE, LZ4, ZLIB, ZSTD, SNAPPY = KINDS
RATIOS_MAX = {LZ4: 255, ZLIB: 1032, ZSTD: 1 << 15, SNAPPY: 22}
"""By codec the most bytes that a compressed byte can become, beside RATIO_EXTRA_BYTES in all."""
RATIO_EXTRA_BYTES = 128 << 10
EMPTY_BYTES_MAX = 64
"""More than any codec makes of an empty payload: ZSTD makes 22 bytes, with all optional fields."""
_ARROW_CODECS = {LZ4: "lz4_raw", ZSTD: "zstd", SNAPPY: "snappy"}
_LZ4_EXTRA_BYTES = 16  # LZ4 makes at most 256 bytes of each 255 bytes, and these in addition
_ZLIB_METHOD, _ZLIB_CHECK = 8, 31  # low half of the first byte; divisor of the first two
_SNAPPY_SIZE_BYTES_MAX = 5
_ZSTD_MAGIC, _ZSTD_SKIPPABLE = 0xFD2FB528, 0x184D2A50  # the second with any last half byte
_ZSTD_BLOCKS_MAX = 1100  # of 128 KiB each, as an encoder makes them: more than a batch may have


def fault_of(kind: int, data: memoryview, size: int) -> str | None:
    """Why a payload cannot decompress to `size` bytes, if its bytes show this before they are
    decompressed; else None. Only a payload that declares 0 bytes is decompressed: such a payload
    has EMPTY_BYTES_MAX at most."""
    packed_bytes = len(data)
    if not packed_bytes:
        return f"a batch of 0 bytes cannot be {size} bytes, decompressed" if size else None
    if size > packed_bytes * RATIOS_MAX[kind] + RATIO_EXTRA_BYTES:
        return f"a batch of {packed_bytes} bytes cannot be {size} bytes, decompressed"
    if kind == LZ4 and packed_bytes > size + size // 255 + _LZ4_EXTRA_BYTES:
        return f"a batch of {packed_bytes} bytes, compressed, is larger than the {size} it declares"
    if (fault := fault_of_start(kind, data, size)) is not None or size:
        return fault
    try:
        decompress(kind, data, size=0)
    except errors.BadEntry:
        return _empty_fault(packed_bytes)
    return None


def fault_of_start(kind: int, data: memoryview, size: int) -> str | None:
    """As `fault_of`, for a payload that begins with `data`, or is `data`."""
    if not size and len(data) > EMPTY_BYTES_MAX:
        return _empty_fault(len(data))
    data = data.cast("B")
    try:
        if kind == ZLIB and not _is_zlib(data):
            return "a batch that declares ZLIB is not ZLIB"
        if kind == SNAPPY and (real_size := _snappy_size(data)) != size:
            return f"a batch that declares {size} bytes has {real_size}, decompressed"
        if kind == ZSTD:
            return _fault_of_zstd(data, size)
    except (IndexError, struct.error):  # the data ends too soon: `decompress` raises then
        return None
    return None


def decompress(kind: int, data: memoryview, size: int) -> bytes:
    """The decompressed payload, of `size` bytes. Raises errors.BadEntry."""
    try:
        if kind == ZLIB:
            return _inflate(data, size)
        codec = pa.Codec(_ARROW_CODECS[kind])
        if kind == LZ4 and size and _fits_in(codec, data, size - 1):
            raise errors.BadEntry(f"a batch that declares {size} bytes has fewer, decompressed")
        payload = bytes(codec.decompress(data, decompressed_size=size, asbytes=True))
    except (zlib.error, pa.ArrowException, OSError) as error:
        raise errors.BadEntry(f"a damaged batch: {error}") from error
    return payload


def _empty_fault(packed_bytes: int) -> str:
    return f"a batch of {packed_bytes} bytes, compressed, declares 0, decompressed"


def _inflate(data: memoryview, size: int) -> bytes:
    inflater = zlib.decompressobj()
    payload = inflater.decompress(data, size + 1)
    if len(payload) > size:
        raise errors.BadEntry(f"a batch that declares {size} bytes has more, decompressed")
    if len(payload) < size or not (size or inflater.eof):
        raise errors.BadEntry(f"a batch that declares {size} bytes ends after {len(payload)}")
    return payload


def _fits_in(codec: pa.Codec, data: memoryview, size: int) -> bool:
    """Whether a block of LZ4 decompresses to `size` bytes or fewer. Arrow does not return the real
    length: for a shorter block it would return memory after the data."""
    try:
        codec.decompress(data, decompressed_size=size)
    except (pa.ArrowException, OSError):
        return False
    return True


def _is_zlib(data: memoryview) -> bool:
    return data[0] & 15 == _ZLIB_METHOD and not (data[0] << 8 | data[1]) % _ZLIB_CHECK


def _snappy_size(data: memoryview) -> int:
    """Raises IndexError."""
    size = 0
    for at in range(_SNAPPY_SIZE_BYTES_MAX):
        size |= (data[at] & 127) << 7 * at
        if data[at] < 128:
            break
    return size


# -- a frame of ZSTD ----------------------------------------------------------------------------
#
#     magic (4) | descriptor (1) | window (1)? | dictionary (0, 1, 2, 4) | size (0, 1, 2, 4, 8)
#     | block: last, kind, size in 3 bytes, its bytes | ... | checksum (4)?
#
# A payload may be several frames, also skippable frames. Clients make one frame.


def _fault_of_zstd(data: memoryview, size: int) -> str | None:
    """Raises IndexError, struct.error."""
    (magic,) = struct.unpack_from("<I", data)
    if magic & ~15 == _ZSTD_SKIPPABLE:
        return None
    if magic != _ZSTD_MAGIC:
        return "a batch that declares ZSTD is not ZSTD"
    descriptor = data[4]
    is_single_segment, size_kind = descriptor & 32, descriptor >> 6
    at = (5 if is_single_segment else 6) + (0, 1, 2, 4)[descriptor & 3]
    if not size_kind and not is_single_segment:
        return None
    size_bytes = 1 << size_kind
    real_size = int.from_bytes(data[at : at + size_bytes], "little") + (
        256 if size_kind == 1 else 0
    )
    if len(data) < at + size_bytes or real_size == size:
        return None
    has_checksum = bool(descriptor & 4)
    if real_size > size or _is_one_frame(data, at + size_bytes, checksum=has_checksum):
        return f"a batch that declares {size} bytes has {real_size}, decompressed"
    return None


def _is_one_frame(data: memoryview, at: int, *, checksum: bool) -> bool:
    """Whether `data` ends with the frame whose blocks begin at `at`. Raises IndexError."""
    for _ in range(_ZSTD_BLOCKS_MAX):
        head = data[at] | data[at + 1] << 8 | data[at + 2] << 16
        at += 3 + (1 if head >> 1 & 3 == 1 else head >> 3)  # kind 1: a byte that is repeated
        if head & 1:
            return at + (4 if checksum else 0) == len(data)
    return False
