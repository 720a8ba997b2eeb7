"""Did it all arrive? What came out of the ledger against the csv, as plain comparisons."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger.demo import flights


@dataclass(frozen=True)
class Check:
    what: str
    passed: bool
    detail: str


def rows_once(name: str, expected: pa.Table, got: pa.Table) -> Check:
    """Every row number of `expected` exactly once in `got`, and no other."""
    want = np.sort(expected["row"].to_numpy())
    have = got["row"].to_numpy()
    seen, counts = np.unique(have, return_counts=True)
    missing = len(np.setdiff1d(want, seen))
    foreign = len(np.setdiff1d(seen, want))
    doubled = int((counts > 1).sum())
    passed = not missing and not doubled and not foreign
    facts = f"missing {missing}, doubled {doubled}, unknown {foreign}"
    return Check(f"{name}: every row once", passed, f"{len(have):,} rows; {facts}")


def in_order_of_carrier(expected: pa.Table, got: pa.Table) -> Check:
    """Within each carrier, offsets rise as the times of the replay did, in one partition."""
    placed = got.sort_by([("partition", "ascending"), ("offset", "ascending")])
    carriers = pc.unique(expected["carrier"]).sort()
    broken = []
    for carrier in carriers.to_pylist():
        want = expected.filter(pc.equal(expected["carrier"], carrier))["row"]
        have = placed.filter(pc.equal(placed["key"], carrier))
        one_place = len(pc.unique(have["partition"])) == 1
        if not one_place or want.to_pylist() != have["row"].to_pylist():
            broken.append(carrier)
    detail = f"{len(carriers)} carriers" + (f", broken: {', '.join(broken)}" if broken else "")
    return Check("flights: order within carrier", not broken, detail)


def same_values(name: str, expected: pa.Table, got: pa.Table) -> Check:
    """Row by row, every column that `got` and the csv share."""
    columns = [column for column in expected.column_names if column in got.column_names]
    want = expected.select(columns).sort_by("row").combine_chunks()
    have = got.select(columns).sort_by("row").combine_chunks()
    unequal = [c for c in columns if not _same(want[c], have[c])]
    detail = f"{len(columns)} columns" + (f", unequal: {', '.join(unequal)}" if unequal else "")
    return Check(f"{name}: values as in the csv", not unequal, detail)


def same_hours(expected: pa.Table, got: pa.Table) -> Check:
    """The Delta table against the same aggregation of the csv, to the last bit of each mean."""
    order = [(column, "ascending") for column in flights.GROUP]
    have = got.select(expected.column_names).sort_by(order).combine_chunks()
    unequal = [c for c in expected.column_names if not _same(expected[c], have[c])]
    detail = f"{have.num_rows:,} of {expected.num_rows:,} groups"
    if unequal:
        detail += f", unequal: {', '.join(unequal)}"
    return Check("Delta table: as from the csv", not unequal, detail)


def committed_once(batch: int | None, versions: list[int]) -> Check:
    """`versions`: the batch ids in the topic's commit records of this query, in log order."""
    times = sum(version == batch for version in versions)
    once_each = len(set(versions)) == len(versions)
    what = f"batch {batch}, killed: committed once"
    detail = f"{times} commit record of it among the query's {len(versions)}"
    return Check(what, once_each and times == 1, detail)


def _same(want: pa.ChunkedArray, have: pa.ChunkedArray) -> bool:
    if len(want) != len(have):
        return False
    return bool(want.combine_chunks().equals(have.cast(want.type).combine_chunks()))
