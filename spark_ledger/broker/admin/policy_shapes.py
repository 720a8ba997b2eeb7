"""The shapes of Pulsar's policies: what a policy consists of, how its JSON is checked, and the
policies of delays and rates. Pure.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.rates import Rate

Values = Mapping[str, Any]
"""Values of policies by name (topic/log/policies.py); a policy that is not set is left out."""

NO_LIMIT = -1
INT_MAX, LONG_MAX = 2**31 - 1, 2**63 - 1
TICK_MS, TICK_MS_MIN = 1000, 100
"""The tick that is shown, and how late a delayed message may be."""


@dataclass(frozen=True, slots=True)
class PulsarPolicy:
    """A policy of Pulsar's, and how it is set.

    `namespace` and `topic`: the last part of its path below a namespace and below a topic; "": it
    is not set there. `ours`: the policies here that it consists of. `take` makes their values from
    Pulsar's JSON, and raises HttpRefusal. `show` makes Pulsar's JSON from the values that are set;
    None: the policy is not set. `record` is the name in the object of all policies of a namespace,
    "" if the object lacks the policy. A namespace without the policy shows `unset`. `verbs` are
    those below a namespace; below a topic there is always a DELETE. With `by_cluster` that object
    has the policy by the cluster's name."""

    namespace: str
    topic: str
    ours: tuple[str, ...]
    take: Callable[[Any], dict[str, Any]]
    show: Callable[[Values], Any]
    record: str
    unset: Any = None
    verbs: tuple[str, ...] = ("GET", "POST", "DELETE")
    by_cluster: bool = False

    def of_namespace(self, values: Values) -> Any:
        shown = self.show(values)
        return self.unset if shown is None else shown


def refused(status: HTTPStatus, reason: str) -> HttpRefusal:
    return HttpRefusal(status, reason)


def wrong_shape(reason: str) -> HttpRefusal:
    return HttpRefusal(HTTPStatus.BAD_REQUEST, reason)


def checked_object(plain: Any, fields: Collection[str] | None = None) -> dict[str, Any]:
    """`fields` are all that the object may have, beside null. Raises HttpRefusal."""
    if not isinstance(plain, dict):
        raise wrong_shape(f"an object is needed, not {plain!r}"[:200])
    unknown = [name for name in plain if plain[name] is not None and name not in (fields or plain)]
    if unknown:
        raise wrong_shape(f"there is no field {unknown[0][:100]!r}, only {', '.join(fields or ())}")
    return plain


def checked_bool(value: Any) -> bool:
    """Raises HttpRefusal."""
    if not isinstance(value, bool):
        raise wrong_shape(f"true or false is needed, not {value!r}")
    return value


def whole_number(value: Any, name: str) -> int:
    """Raises HttpRefusal."""
    if type(value) is not int or not -INT_MAX <= value <= INT_MAX:
        raise wrong_shape(f"{name} is a whole number, not {value!r}")
    return value


# -- delays and rates ------------------------------------------------------------------------------

_LONGEST = ("maxDeliveryDelayInMillis", "maxDelayInMillis")
"""Clients have two names for the field."""


def _take_delays(plain: Any) -> dict[str, Any]:
    """A tick is how late a delayed message may be: TICK_MS_MIN holds for every longer tick."""
    default = {"active": True, "tickTime": TICK_MS}
    delays = {**default, **checked_object(plain, (*default, *_LONGEST))}
    tick_ms = delays["tickTime"]
    longest_ms = next((delays[name] for name in _LONGEST if name in delays), 0)
    if not all(type(ms) is int and 0 <= ms <= LONG_MAX for ms in (tick_ms, longest_ms)):
        raise wrong_shape(
            f"tickTime {tick_ms!r} and {_LONGEST[0]} {longest_ms!r} are no whole numbers from 0"
        )
    if tick_ms < TICK_MS_MIN:
        raise refused(
            HTTPStatus.NOT_IMPLEMENTED,
            f"a tickTime of {tick_ms} ms is refused: a message may be {TICK_MS_MIN} ms late",
        )
    return {"delayed_delivery": checked_bool(delays["active"]), "delay_ms_max": longest_ms or None}


def _show_delays(values: Values) -> Any:
    if "delayed_delivery" not in values:
        return None
    longest_ms = values.get("delay_ms_max") or 0
    active = {"active": values["delayed_delivery"], "tickTime": TICK_MS}
    return {**active, **dict.fromkeys(_LONGEST, longest_ms)}


DELAYS = PulsarPolicy(
    *("delayedDelivery", "delayedDelivery", ("delayed_delivery", "delay_ms_max")),
    *(_take_delays, _show_delays),
    record="delayed_delivery_policies",
)
_DISPATCH = {"dispatchThrottlingRateInMsg": "messages", "dispatchThrottlingRateInByte": "bytes"}
_LIMITS = {
    "publish_rate": {
        "publishThrottlingRateInMsg": "messages",
        "publishThrottlingRateInByte": "bytes",
    },
    "dispatch_rate": _DISPATCH,
    "subscription_dispatch_rate": _DISPATCH,
    "subscribe_rate": {"subscribeThrottlingRatePerConsumer": "requests"},
}
"""By policy the fields with a limit, and those of Rate for them. A limit below 1 is no limit."""
_PERIOD, _RELATIVE = "ratePeriodInSecond", "relativeToPublishRate"
_PERIODS_S = {"dispatch_rate": 1, "subscription_dispatch_rate": 1, "subscribe_rate": 30}
"""The period of a rate that does not give one; rates of other policies are always a second's."""


def rate(ours: str, name: str, record: str) -> PulsarPolicy:
    limits, has_period = _LIMITS[ours], ours in _PERIODS_S
    may_be_relative = ours.endswith("dispatch_rate")
    fields = (*limits, _PERIOD, *((_RELATIVE,) if may_be_relative else ()))

    def take(plain: Any) -> dict[str, Any]:
        given = {_PERIOD: _PERIODS_S.get(ours, 1), **checked_object(plain, fields)}
        values: dict[str, Any] = {}
        for pulsars, field in {**limits, _PERIOD: "s"}.items():
            values[field] = given.get(pulsars, NO_LIMIT)
            if type(values[field]) is not int or abs(values[field]) > LONG_MAX:
                raise wrong_shape(f"{pulsars} is a whole number, not {values[field]!r}"[:200])
        if values["s"] < 1 or (not has_period and values["s"] > 1):
            raise refused(
                HTTPStatus.PRECONDITION_FAILED, f"{_PERIOD} must not be {values['s']} seconds"
            )
        if may_be_relative:
            values["relative"] = checked_bool(given.get(_RELATIVE, False))
        kept: dict[str, Any] = {field: value for field, value in values.items() if value > 0}
        text = str(Rate(**kept))
        return {ours: text if Rate.parse(text) is not None else None}

    def show(values: Values) -> Any:
        if ours not in values:
            return None
        shown_rate = Rate.parse(values[ours]) or Rate(s=_PERIODS_S.get(ours, 1))
        shown: dict[str, Any] = {
            pulsars: getattr(shown_rate, field) or NO_LIMIT for pulsars, field in limits.items()
        }
        if has_period:
            shown[_PERIOD] = shown_rate.s
        return {**shown, _RELATIVE: shown_rate.relative} if may_be_relative else shown

    return PulsarPolicy(name, name, (ours,), take, show, record, by_cluster=True)
