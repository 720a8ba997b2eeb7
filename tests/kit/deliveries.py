"""What the consumers of one Shared or Key_Shared subscription got and acknowledged, judged event by
event: the same rules for hand-made histories and for runs in which brokers are killed.

A *session* is one consumer from its join to its end. It *holds* a message from the delivery until
it sends an acknowledgement or a negative one, or ends. A message is a key and a number; the numbers
of a key begin at 0 and rise by 1 in the order in which its producer sent them.

    deliveries = Deliveries("s", time.monotonic, by_key=True)
    deliveries.delivered("a", ("k", 0), (0, 17))
    deliveries.asked("a", ("k", 0))
    deliveries.receipt("a", ("k", 0))
    deliveries.check(stored=[("k", 0)])

What is required:
- *lost*: each stored message was delivered; *unacknowledged*: and acknowledged;
- *again*: no message is delivered after the receipt of its acknowledgement, but for a seek;
- *two*: a message is held by one session at most;
- *key*, if `by_key`: all that is held of one key is held by one session;
- *order*, if `by_key`, for keys of which nothing was negatively acknowledged: no message comes
  before an earlier one of its key that was not acknowledged;
- *moved*: a message has one place; *unknown*: each was stored;
- *sought*: what was acknowledged, at or after the target of a seek, comes again after it.

A broker that has lost its partition, or whose subscription was sought, may send messages until it
learns of that. It gives no receipts any more. So what a session got counts only if the session got
the receipt of an acknowledgement that it sent later; and that a session held something counts only
if it got such a receipt too. Between the begin of a seek and its end no client can know which side
a receipt is on, so such a receipt promises nothing for the messages that are sought.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

FAULTS_MAX = 20

Message = tuple[str, int]
"""A key and a number."""
Place = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A fault, if `session` got a receipt for what it acknowledged after the event `number`, and so
    did `other`, if any. `earlier`: the message that was passed over; it was not if it had been
    acknowledged before."""

    number: int
    kind: str
    text: str
    session: str
    other: str | None = None
    earlier: Message | None = None


@dataclass(slots=True)
class _Delivered:
    """A message that was delivered. `got`: the session that got it last, and the number of that
    event. `asked`: the number of the last acknowledgement, -1: there was none; `seeks`: how many
    begins and ends of seeks there were then."""

    place: Place
    holders: dict[str, None] = field(default_factory=dict)
    got: tuple[str, int] = ("", -1)
    asked: int = -1
    seeks: int = -1
    has_receipt: bool = False
    story: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Key:
    """`due`: the number after the highest that was delivered; None: any, after a seek. `open`: the
    numbers that were delivered and not acknowledged since."""

    due: int | None = 0
    open: dict[int, None] = field(default_factory=dict)
    is_nacked: bool = False


@dataclass(slots=True)
class _Session:
    """`asked`: the number of the event by which the session acknowledged each message; `proved`:
    the highest of these with a receipt."""

    held: dict[Message, None] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    asked: dict[Message, int] = field(default_factory=dict)
    proved: int = -1


class Deliveries:
    """The history of one subscription. `clock` gives the seconds that messages of faults show."""

    def __init__(self, name: str, clock: Callable[[], float], *, by_key: bool) -> None:
        self.name = name
        self.by_key = by_key
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._number = 0
        self._faults: list[tuple[str, str]] = []
        self._suspicions: list[Suspicion] = []
        self._messages: dict[Message, _Delivered] = {}
        self._keys: dict[str, _Key] = {}
        self._sessions: dict[str, _Session] = {}
        self._seeks = 0
        self._seek_times: list[str] = []
        self._sought: dict[int, int] = {}
        self._due: dict[Message, None] = {}

    def __len__(self) -> int:
        """The number of messages that were delivered."""
        return len(self._messages)

    # -- events --------------------------------------------------------------------------------

    def delivered(self, session: str, message: Message, place: Place) -> None:
        self.counts["deliveries"] += 1
        self.counts["redeliveries"] += message in self._messages
        seen = self._messages.setdefault(message, _Delivered(place))
        self._note(seen, f"delivered to {session}")
        if seen.place != place:
            self._fault("moved", message, f"was at {seen.place}, then at {place}")
        getter = self._sessions.setdefault(session, _Session())
        if session in seen.holders:
            self._suspect("two", message, f"delivered to {session}, which holds it", session)
        for holder in seen.holders:
            if holder != session:
                text = f"delivered to {session}, held by {holder}"
                self._suspect("two", message, text, session, holder)
        if seen.has_receipt:
            self._suspect("again", message, f"delivered to {session} after a receipt", session)
        elif self.by_key:
            self._judge_key(session, getter, message)
        seen.holders[session] = None
        seen.got = session, self._number
        getter.held[message] = None

    def asked(self, session: str, message: Message) -> None:
        """The session sent an acknowledgement."""
        self.counts["acknowledgements"] += 1
        seen = self._messages[message]
        self._note(seen, f"acknowledged by {session}")
        self._release(session, message)
        seen.asked = self._sessions[session].asked[message] = self._number
        seen.seeks = self._seeks
        self._key(message).open.pop(message[1], None)
        self._due.pop(message, None)

    def receipt(self, session: str, message: Message) -> None:
        """The session got the receipt of an acknowledgement."""
        self.counts["receipts"] += 1
        seen, of_session = self._messages[message], self._sessions[session]
        self._note(seen, f"receipt for {session}")
        asked = of_session.asked[message]
        of_session.proved = max(of_session.proved, asked)
        if self._is_sought(seen.place) and (self._seeks % 2 or seen.seeks != self._seeks):
            return
        getter, number = seen.got
        if getter != session and number > asked:
            text = f"delivered to {getter} after an acknowledgement of {session}"
            self._suspicions.append(Suspicion(number, "again", self._told(message, text), getter))
        seen.has_receipt = True
        self._key(message).open.pop(message[1], None)

    def nacked(self, session: str, message: Message) -> None:
        self.counts["nacks"] += 1
        self._note(self._messages[message], f"nacked by {session}")
        self._release(session, message)
        self._key(message).is_nacked = True

    def left(self, session: str) -> None:
        """The session ended, for whatever reason."""
        ended = self._sessions.setdefault(session, _Session())
        for message in list(ended.held):
            self._note(self._messages[message], f"{session} left")
            self._release(session, message)
        ended.last.clear()

    def seek_begins(self, positions: Mapping[int, int]) -> None:
        """A program outside of the consumers moves the subscription."""
        self._seeks += 1
        self._seek_times.append(f"{self._clock():.3f}")
        for partition, offset in positions.items():
            self._sought[partition] = min(offset, self._sought.get(partition, offset))
        for message, seen in self._messages.items():
            if seen.has_receipt and seen.place[1] >= positions.get(seen.place[0], math.inf):
                seen.has_receipt = False
                self._note(seen, "sought")
                self._due[message] = None
        self._forget_order()

    def seek_ends(self) -> None:
        self._seeks += 1
        self._seek_times.append(f"{self._clock():.3f}")
        self.counts["seeks"] += 1
        self._forget_order()

    # -- judgement -----------------------------------------------------------------------------

    def missing(self, stored: Iterable[Message]) -> list[Message]:
        """The messages that were not delivered, or not acknowledged; after a seek, not again."""
        return [
            message
            for message in stored
            if message in self._due
            or message not in self._messages
            or self._messages[message].asked < 0
        ]

    def faults(self) -> list[tuple[str, str]]:
        """What is wrong so far: the kind and a text."""
        proved = {name: session.proved for name, session in self._sessions.items()}
        return self._faults + [
            (suspicion.kind, suspicion.text)
            for suspicion in self._suspicions
            if proved[suspicion.session] > suspicion.number
            and (suspicion.other is None or proved[suspicion.other] > suspicion.number)
            and not self._was_acknowledged(suspicion.earlier, suspicion.number)
        ]

    def check(self, stored: Iterable[Message]) -> None:
        """Once all is over. `stored`: the messages with a send's receipt. Raises AssertionError
        with all faults."""
        is_stored = dict.fromkeys(stored)
        for message in self.missing(is_stored):
            if message not in self._messages:
                self._faults.append(("lost", f"{message} was not delivered"))
            elif message in self._due:
                self._fault("sought", message, "did not come again after a seek")
            else:
                self._fault("unacknowledged", message, "not acknowledged")
        for message in self._messages:
            if message not in is_stored:
                self._fault("unknown", message, "was not stored")
        self.raise_faults()

    def raise_faults(self) -> None:
        """Raises AssertionError if there are faults."""
        faults = self.faults()
        if faults:
            lines = [f"{kind}: {text}" for kind, text in faults[:FAULTS_MAX]]
            kinds = dict(Counter(kind for kind, _ in faults))
            raise AssertionError("\n  ".join([f"{self.name}: {kinds}", *lines]))

    def _judge_key(self, session: str, getter: _Session, message: Message) -> None:
        name, number = message
        key = self._key(message)
        is_ordered = not key.is_nacked and not self._seeks % 2
        for other in key.open:
            holders = self._messages[(name, other)].holders
            if not holders and other < number and is_ordered:
                earlier = "; ".join(self._messages[(name, other)].story)
                text = f"delivered to {session} before {other} ({earlier})"
                self._suspect("order", message, text, session, earlier=(name, other))
            for holder in holders if session not in holders and other != number else ():
                text = f"delivered to {session}, but {holder} holds {other}"
                self._suspect("key", message, text, session, holder)
        if is_ordered:
            if key.due is not None and number > key.due:
                text = f"delivered to {session} before {key.due}"
                self._suspect("order", message, text, session)
            if number <= getter.last.get(name, -1):
                text = f"delivered after {getter.last[name]} to {session}"
                self._suspect("order", message, text, session)
        key.due = max(key.due or 0, number + 1)
        key.open[number] = None
        getter.last[name] = number

    def _was_acknowledged(self, message: Message | None, number: int) -> bool:
        """Whether the receipt is for an acknowledgement before the event of that number."""
        if message is None:
            return False
        seen = self._messages[message]
        return seen.has_receipt and seen.asked < number

    def _key(self, message: Message) -> _Key:
        return self._keys.setdefault(message[0], _Key())

    def _release(self, session: str, message: Message) -> None:
        self._sessions[session].held.pop(message, None)
        self._messages[message].holders.pop(session, None)

    def _is_sought(self, place: Place) -> bool:
        return place[1] >= self._sought.get(place[0], math.inf)

    def _forget_order(self) -> None:
        for name, key in self._keys.items():
            key.due = None
            held = [number for number in key.open if self._messages[(name, number)].holders]
            key.open = dict.fromkeys(held)

    def _note(self, seen: _Delivered, text: str) -> None:
        self._number += 1
        seen.story.append(f"{self._clock():.3f} {text}")

    def _suspect(
        self,
        kind: str,
        message: Message,
        text: str,
        session: str,
        other: str | None = None,
        earlier: Message | None = None,
    ) -> None:
        sentence = self._told(message, text)
        self._suspicions.append(Suspicion(self._number, kind, sentence, session, other, earlier))

    def _fault(self, kind: str, message: Message, text: str) -> None:
        self._faults.append((kind, self._told(message, text)))

    def _told(self, message: Message, text: str) -> str:
        seen, seeks = self._messages[message], " to ".join(self._seek_times) or "none"
        return f"{message} at {seen.place} {text} ({'; '.join(seen.story)}; seek: {seeks})"
