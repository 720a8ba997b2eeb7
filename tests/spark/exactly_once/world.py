"""What a case has in hand: queries from steps into topics of their own, the drivers that run them,
a proxy between these and ZooKeeper, and an onlooker who goes around it.

Cases share a world: each begins with a query that moves and leaves one that does.
"""

import itertools
import random
import time
from pathlib import Path

from spark_ledger.local import LocalCluster
from spark_ledger.local.cluster import ROOT
from tests.spark.exactly_once.audit import Onlooker, check_rows
from tests.spark.exactly_once.driver_process import DriverProcess
from tests.spark.exactly_once.query import Query
from tests.spark.exactly_once.zookeeper_proxy import ZooKeeperProxy

MASTER = "local[2,4]"  # a task may fail three times
SEVERAL = 3
PAUSE_S = 0.2


class World:
    """`name` begins the names of its topics; what is drawn is drawn from `rng`. The query that
    cases hurt one after another writes to `several` topics, or to one."""

    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        name: str,
        rng: random.Random,
        several: int = SEVERAL,
    ) -> None:
        self.rng = rng
        self._several = several
        self.onlooker = Onlooker(cluster.service_url)
        self.proxy = ZooKeeperProxy(int(cluster.zookeeper.address.rpartition(":")[2]))
        self._folder = folder
        self._name = name
        self._numbers = itertools.count()
        self._drivers: list[DriverProcess] = []
        self._driver: DriverProcess | None = None
        self._spare: DriverProcess | None = None
        self._query: Query | None = None

    # -- drivers ---------------------------------------------------------------------------------

    @property
    def driver(self) -> DriverProcess:
        """The one that runs; another one when it was killed: the spare, if there is one."""
        if self._driver is None or self._driver.killed:
            self._driver, self._spare = self.spare, None
        return self._driver

    @property
    def spare(self) -> DriverProcess:
        """Another one, which runs nothing yet."""
        if self._spare is None or self._spare.killed:
            self._spare = self.new_driver()
        return self._spare

    def swap_drivers(self) -> None:
        self._driver, self._spare = self._spare, self._driver

    def new_driver(self, master: str = MASTER, **conf: str) -> DriverProcess:
        """One more: Spark starts, nothing waits for that."""
        url = f"zk://{self.proxy.address}{ROOT}"
        made = DriverProcess(url, self._folder, next(self._numbers), master, conf)
        self._drivers.append(made)
        return made

    # -- queries ---------------------------------------------------------------------------------

    @property
    def query(self) -> Query:
        """The one that cases hurt one after another."""
        if self._query is None:
            self._query = self.new_query(self._several)
        return self._query

    @query.setter
    def query(self, query: Query) -> None:
        self._query = query

    def new_query(self, several: int = 0) -> Query:
        """One more, into a topic of its own, or into several; not started."""
        number = next(self._numbers)
        folder, topic = self._folder / f"query-{number}", f"{self._name}-{number}"
        return Query(folder, topic, self.rng, several=several)

    def start(self, query: Query, format: str = "ledger", **options: str) -> None:
        """In the driver that runs; if it runs already it goes on."""
        self.driver.start(query, format, **options)

    def until_done(self, query: Query, step: int) -> None:
        self.driver.wait(lambda: query.steps_done() > step, f"the end of step {step}")

    def moving(self, query: Query) -> Query:
        """In a run that has done a batch, so that the next is not its first."""
        self.start(query)
        self.until_done(query, query.feed())
        return query

    # -- others ----------------------------------------------------------------------------------

    def topic_id(self, query: Query) -> str:
        """Of its topic, or of the one of several that has most of its rows."""
        return self.onlooker.topic_id(query.topics[0])

    def commits(self, query: Query) -> int:
        """How many each of the query's topics has: all of them equally many, at any moment."""
        return self.onlooker.commits(query.topics)

    def clean(self) -> None:
        """The janitor comes by: it finds nobody stale, and may take nothing that is in use. The
        topics that cases hurt are checkpointed, and their logs trimmed."""
        self.onlooker.clean()
        if self._query is not None:
            self.onlooker.checkpoint(self._query.topics)

    def condemn(self, query: Query) -> None:
        """The janitor comes by and takes the query's run for dead, which it is not."""
        intents = self.onlooker.open_intents(query.id)
        assert self.onlooker.clean(intents).condemned == tuple(intents)

    def point_in_tasks(self, query: Query) -> str:
        """Of the next step, in the first attempt of one of its two tasks."""
        place, task = self.rng.choice(("start", "half", "end")), self.rng.randrange(2)
        return f"{place}-{query.next_step}-{task}-0"

    def pause(self) -> None:
        """A moment drawn by the seed, in which whatever runs goes on."""
        time.sleep(self.rng.uniform(0.0, PAUSE_S))

    def check(self, query: Query) -> None:
        """Every row that was fed is there once and in order; nothing else is left."""
        self.driver.stop(query)
        self.check_rows(query)
        self.onlooker.check_ledgers(query.id, query.topics)
        self.check_rows(query)  # in what the janitor has left

    def check_rows(self, query: Query) -> None:
        read = self._folder / "read.parquet"
        read.unlink(missing_ok=True)
        self.driver.do("read", topics=",".join(query.topics), into=str(read))
        check_rows(read, query.fed())

    def close(self) -> None:
        for driver in self._drivers:
            driver.kill()
        self.proxy.close()
        self.onlooker.close()
