"""Places in a topic as spark_ledger.Admin takes them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from spark_ledger import errors
from spark_ledger.client.admin import target_of
from spark_ledger.topic.subscription.seek_target import CommittedSince, End

NEW_YEAR_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


def test_a_place_is_an_end_a_time_or_offsets():
    assert target_of("earliest") is End.EARLIEST
    assert target_of("latest") is End.LATEST
    assert target_of({0: 12, 3: 0}) == {0: 12, 3: 0}
    assert target_of(datetime(2026, 1, 1, tzinfo=UTC)) == CommittedSince(NEW_YEAR_MS)


def test_a_time_as_text_is_utc_unless_it_says_another_offset():
    assert target_of("2026-01-01") == CommittedSince(NEW_YEAR_MS)
    assert target_of("2026-01-01T00:00:00Z") == CommittedSince(NEW_YEAR_MS)
    assert target_of("2026-01-01T02:00:00+02:00") == CommittedSince(NEW_YEAR_MS)
    east = timezone(timedelta(hours=2))
    assert target_of(datetime(2026, 1, 1, 2, tzinfo=east)) == CommittedSince(NEW_YEAR_MS)


def test_a_time_without_its_zone_is_refused():
    with pytest.raises(errors.BadConfig, match="time zone"):
        target_of(datetime(2026, 1, 1))


def test_what_is_no_place_is_refused():
    with pytest.raises(errors.BadConfig, match="no place"):
        target_of("newest")
    with pytest.raises(TypeError):
        target_of(17)
    with pytest.raises(TypeError):
        target_of({"0": 1})
