import logging

from bookie_server.reclaim.collect import MASS_MIN, MassRule

MANY = list(range(MASS_MIN + 5))


def test_a_mass_that_goes_waits_for_a_second_look_with_a_warning_and_is_no_error(caplog):
    caplog.set_level(logging.INFO)
    rule = MassRule("have no record any more")
    assert rule.allowed(MANY, len(MANY)) == []
    assert rule.allowed([*MANY, 99], len(MANY) + 1) == MANY
    levels = [each.levelname for each in caplog.records]
    assert levels == ["WARNING", "INFO", "WARNING"]
    count = len(MANY)
    assert caplog.messages[0] == (
        f"{count} of {count} ledgers have no record any more; waits for the next look to confirm"
    )
    assert caplog.messages[2].startswith(f"1 of {count + 1} ledgers")


def test_a_few_go_at_once_and_silently(caplog):
    assert MassRule("have no record any more").allowed([1, 2], 50) == [1, 2]
    assert not caplog.messages
