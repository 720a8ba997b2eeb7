import pyarrow as pa

from spark_ledger import errors
from spark_ledger.broker.log.topic_commits import RollLimits
from tests.unit.spark_ledger.broker.owners import Sent, owner_of
from tests.unit.spark_ledger.topic.stage import play

COLUMNS = pa.schema([("id", pa.int64())])


async def sent(owner, value):
    run = Sent(value)
    owner.writer.append(run)
    await run.over.wait()
    return [type(error) for error in run.errors]


def test_a_producer_is_sent_away_where_a_schema_came_into_force_until_it_is_withdrawn():
    async def act(stage):
        schemas = stage.client.schemas
        owner = await owner_of(stage, limits=RollLimits(entries=1))
        assert await sent(owner, b"a") == []
        await schemas.register(stage.topic, COLUMNS)

        said = [await sent(owner, b"b") for _ in range(4)]
        assert [errors.SchemaIncompatible] in said, "at the next ledger, if not at once"

        await schemas.withdraw(stage.topic)
        assert await sent(owner, b"c") == []
        await owner.writer.close()
        await owner.commits.close()

    play(act)
