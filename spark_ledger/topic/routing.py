"""Which partition a row goes to: by its key's hash; without a key, where its task's rows go.

Always true: the hash is murmur3 (x86, 32 bit, seed 0) of the key's bytes, partition = (hash &
0x7fffffff) % partitions, the same in every language and for ever: it decides where a key's rows
are. Whole columns are hashed by numpy; no Python loop runs over rows.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def partitions_of(keys: pa.Array, partitions: int, sticky: int) -> npt.NDArray[np.int64]:
    """The partition of each row of the binary column `keys`; null keys go to `sticky`."""
    raise NotImplementedError


def murmur3_32(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """The hash of each value of a binary column; of null it is that of the empty value."""
    raise NotImplementedError
