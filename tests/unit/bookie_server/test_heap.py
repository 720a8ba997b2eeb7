"""What a bookie's heap keeps of memory that was freed."""

import subprocess
import sys

import pytest

BURSTS, ENTRIES, PAGES_OF_ENTRY = 5, 32, (1 << 20) // 4096
BURST_BYTES = ENTRIES << 20
IN_A_CHILD = f"""
import resource
from bookie_server.__main__ import HEAP_KEPT_BYTES, _keep_the_heap_small

def burst():
    entries = [bytearray(1 << 20) for _ in range({ENTRIES})]
    return len(entries)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

assert {BURST_BYTES} < HEAP_KEPT_BYTES
_keep_the_heap_small()
burst()
before = faults()
for _ in range({BURSTS}):
    burst()
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what other systems keep is not ours to say")
def test_buffers_of_a_burst_of_large_entries_are_made_without_asking_the_kernel_again():
    said = subprocess.run([sys.executable, "-c", IN_A_CHILD], capture_output=True, check=True)
    assert int(said.stdout) < BURSTS * ENTRIES * PAGES_OF_ENTRY // 10
