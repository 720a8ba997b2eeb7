"""A topic's state kept current in memory, so that an idle poll needs no round trip (hazard 47).

Always true: at most one watch, on head, is outstanding. A follower folds a change as soon as its
watch fires, but reads head at most every 50 ms; without a change it reads head again every 10 s.
It returns a state for at most 30 s after the state was last compared with the store. A broker has
thousands of topics and decides nothing by their states, so in a broker the 10 s and the 30 s are
six times as long. The watch also fires when the connection to the store is interrupted. If the
store or a ledger of the topic cannot be read, the follower tries again. The state of a deleted
topic never changes: the follower stops reading, and returns this state for ever.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from spark_ledger import errors
from spark_ledger.async_tasks import cancel, woken
from spark_ledger.metadata.store import OutcomeUnknown, StoreUnavailable
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import TopicLog

REREAD_S = 10.0
READ_GAP_S = 0.05
"""The shortest time between the beginnings of two reads of head."""
RETRY_S = 1.0
UNCONFIRMED_REREADS = 3
"""A state is returned for this many times `reread_s` after it was compared with the store."""
_PASSING_ERRORS = (StoreUnavailable, OutcomeUnknown, errors.Unavailable, errors.DataUnavailable)
"""Errors of the store, or of the bookies that hold bodies and checkpoints; a later read may
succeed."""


class TopicFollower:
    """Any thread may call `state`; the other methods belong to the loop."""

    def __init__(
        self, log: TopicLog, name: str | None = None, reread_s: float | None = None
    ) -> None:
        """Errors name the topic by `name` beside its id. `reread_s`: the time after which head is
        read again without a change (None: REREAD_S)."""
        self.log = log
        self._reread_s = REREAD_S if reread_s is None else reread_s
        self._label = f"topic {log.topic_id}"
        if name is not None:
            self._label = f"topic {name!r} (id {log.topic_id})"
        self._changed = asyncio.Event()
        self._folded = asyncio.Event()
        self._is_watching = False
        self._changes_seen = 0  # how often a watch fired
        self._changes_folded = 0  # the changes that `_latest` contains
        self._latest: tuple[TopicState, float] | None = None
        self._latest_history = log.history_number  # the history of `_latest`
        self._failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self.listeners: dict[Callable[[TopicState], None], None] = {}
        """Called with each new state, once `state` returns the new state."""
        self.on_end: Callable[[], None] = _do_nothing
        """Called when the follower stops by itself: after an error, or as the topic is deleted."""
        self._loop = asyncio.get_running_loop()
        self._next_read_at = self._loop.time()

    async def start(self) -> TopicState:
        """Fold the newest state, after a sync, then follow the topic in the background.

        Raises errors.TopicNotFound, errors.UnsupportedFormat, errors.Unavailable.
        """
        try:
            state = await self._read(fresh=True)
        except (StoreUnavailable, OutcomeUnknown) as error:
            raise errors.Unavailable(f"{self._label} cannot be read: {error}") from error
        self._task = self._loop.create_task(self._follow())
        return state

    def state(self) -> TopicState:
        """The newest state, from memory. Raises errors.Unavailable if the last comparison with the
        store was too long ago; raises the error that stopped the follower, if an error did."""
        if self._failure is not None:
            raise self._failure
        assert self._latest is not None, "start() comes first"
        state, confirmed_s = self._latest
        unconfirmed_s_max = UNCONFIRMED_REREADS * self._reread_s
        if not state.deleted and self._loop.time() - confirmed_s > unconfirmed_s_max:
            raise errors.Unavailable(
                f"{self._label} could not be read for {unconfirmed_s_max:.0f} s"
            )
        return state

    @property
    def failure(self) -> Exception | None:
        """The error that stopped the follower: `state` raises it for ever."""
        return self._failure

    @property
    def is_behind(self) -> bool:
        """Whether a watch reported a change that is not in `state` yet."""
        return self._changes_folded < self._changes_seen

    async def catch_up(self, within_s: float) -> None:
        """Return once `state` has the changes that watches reported before this call, or after
        `within_s`."""
        changes_seen = self._changes_seen
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._changes_folded < changes_seen:
                    await self._folded.wait()

    async def confirmed_history_number(self, within_s: float) -> int:
        """The history number (TopicLog.history_number) of `state`. Waits until `state` was compared
        with the store through the newest connection. Raises errors.Unavailable after `within_s`,
        and as `state`."""
        try:
            async with asyncio.timeout(within_s):
                while self.log.is_doubted or self._latest_history != self.log.history_number:
                    self.state()
                    self._changed.set()
                    await self._folded.wait()
        except TimeoutError:
            raise errors.Unavailable(
                f"{self._label} was not compared with the metadata store in {within_s:.0f} s"
            ) from None
        return self._latest_history

    async def wait_for_commit(self, number: int) -> TopicState:
        """Wait, without a limit, until the state contains commit `number`; return the state.
        Returns early if the log has another history, because the metadata store went back in time.
        Raises as `state`."""
        history_number = self.log.history_number
        while (state := self.state()).next <= number and not state.deleted:
            if history_number != self.log.history_number:
                return state
            await woken(self._folded, self._reread_s)
        return state

    async def close(self) -> None:
        if self._task is not None:
            await cancel(self._task)
            self._task = None

    async def _follow(self) -> None:
        try:
            while not self._is_deleted:
                await self._wait_for_change()
                await asyncio.sleep(self._next_read_at - self._loop.time())
                try:
                    await self._read(fresh=False)
                except _PASSING_ERRORS:
                    self._changed.set()
                    await asyncio.sleep(RETRY_S)
        except Exception as error:  # `state` raises an error of any class
            self._failure = error
        self.on_end()

    @property
    def _is_deleted(self) -> bool:
        return self._latest is not None and self._latest[0].deleted

    async def _wait_for_change(self) -> None:
        await woken(self._changed, self._reread_s)

    async def _read(self, *, fresh: bool) -> TopicState:
        """Fold, and set a watch unless a watch is outstanding."""
        self._changed.clear()
        began_s, changes_seen = self._loop.time(), self._changes_seen
        self._next_read_at = began_s + READ_GAP_S
        watch = None if self._is_watching else self._on_watch_fired
        self._is_watching = True
        try:
            state = await self.log.fold(fresh=fresh, watch=watch, commit_expected=self.is_behind)
        except BaseException:
            self._is_watching = self._is_watching and watch is None
            raise
        self._latest, self._changes_folded = (state, began_s), changes_seen
        self._latest_history = self.log.history_number
        self._folded.set()
        self._folded = asyncio.Event()  # set by the next fold
        for listener in list(self.listeners):
            listener(state)
        if self._loop.time() - began_s > self._reread_s:  # the read took too long: read again
            self._changed.set()
        return state

    def _on_watch_fired(self) -> None:
        self._is_watching = False
        self._changes_seen += 1
        self._changed.set()


def _do_nothing() -> None:
    """The default `on_end`."""
