"""Units of sizes and times."""

import pytest

from spark_ledger import units


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [
        (None, ""),
        (0, "0.0 MiB"),
        (40 << 20, "40.0 MiB"),
        ((1 << 30) - (1 << 20), "1023.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 29, "2.5 GiB"),
    ],
)
def test_space_is_told_in_gib_and_below_one_in_mib(size_bytes, said):
    assert units.shown(size_bytes) == said


@pytest.mark.parametrize(
    ("text", "allowed", "amount"),
    [
        ("12", units.BYTES, 12),
        ("2 GiB", units.BYTES, 2 << 30),
        (" 10t ", units.BYTES, 10 << 40),
        ("64mb", units.SPARK_BYTES, 64 << 20),
        ("7b", units.SPARK_BYTES, 7),
        ("90m", units.MS, 5_400_000),
        ("90m", units.S, 5400),
        ("2min", units.SPARK_MS, 120_000),
        ("1GB", units.BYTES, None),
        ("10ms", units.S, None),
        ("2min", units.MS, None),
        ("-1d", units.MS, None),
        ("1.5h", units.MS, None),
        ("", units.MS, None),
        ("9" * 20, units.MS, None),
    ],
)
def test_an_amount_is_a_number_with_a_unit_that_is_allowed_or_without_one(text, allowed, amount):
    assert units.parse(text, allowed) == amount
