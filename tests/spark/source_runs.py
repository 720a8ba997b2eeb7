"""A source as Spark's process for it calls it, with no session of Spark."""


def poll(run, start):
    return run.latestOffset(start, run.getDefaultReadLimit())


def read(run, start, end):
    rows = []
    for partition in run.partitions(start, end):
        for batch in run.read(partition):
            rows += [int(value) for value in batch.column("value").to_pylist()]
    return rows
