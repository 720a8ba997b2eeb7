"""How long a write takes whose rows name many topics by their column: into new ones, and again.

python benchmarks/many_topics.py               4,000 rows for 400 topics, three times
python benchmarks/many_topics.py --topics 100
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import workload
from spark_ledger.local import LocalCluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=400)
    parser.add_argument("--rows", type=int, default=4_000)
    given = parser.parse_args()
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        spark = workload.session()
        target = workload.Format("ledger", {"serviceUrl": cluster.service_url}, {})

        def write(topics: int, prefix: str) -> float:
            rows = workload.rows(spark, given.rows, 20, 2)
            named = f"concat('{prefix}', pmod(hash(key), {topics})) AS topic"
            frame = workload.kept(rows.selectExpr(named, "key", "value"), given.rows)
            return workload.seconds(lambda: workload.write(frame, target))

        write(2, "warm-up-")
        for what in ("new", "there", "there"):
            took_s = write(given.topics, "many-")
            print(f"{given.rows} rows for {given.topics} topics, {what}: {took_s:.2f} s")
        spark.stop()


if __name__ == "__main__":
    main()
