import asyncio
import logging

from bookie_server.start import self_test
from bookie_server.start.self_test import Measurement, finding_of, measure

GOOD = [0.0005] * 50


def test_a_disk_that_syncs_in_half_a_millisecond_is_not_spoken_of():
    assert finding_of(Measurement(GOOD, "ext4")) is None


def test_a_disk_that_was_slow_for_a_moment_is_not_spoken_of():
    """Somebody else was at work: so it is at every start on a busy machine."""
    assert finding_of(Measurement([*GOOD[:-1], 0.030], "ext4")) is None
    assert finding_of(Measurement([*GOOD[:30], *[0.030] * 20], "ext4")) is None


def test_a_disk_that_is_slow_now_and_then_in_most_batches_is_called_slow_with_its_figures():
    finding = finding_of(Measurement([*GOOD[:9], 0.030] * 5, "ext4"))
    assert finding is not None
    assert "syncs slowly" in finding
    assert "p50 0.5 ms, p99 30 ms of 50 synced writes" in finding


def test_a_disk_so_slow_that_few_syncs_were_timed_is_called_slow():
    assert "syncs slowly" in (finding_of(Measurement([0.2, 0.2], "ext4")) or "")


def test_syncs_faster_than_any_disk_are_called_fake():
    finding = finding_of(Measurement([0.000002] * 50, "ext4"))
    assert finding is not None
    assert "may not sync at all" in finding


def test_a_memory_file_system_is_named_whatever_its_speed():
    for kind in ("tmpfs", "ramfs"):
        assert f"in memory ({kind})" in (finding_of(Measurement(GOOD, kind)) or "")


def test_measuring_takes_its_budget_at_most_and_leaves_nothing(tmp_path):
    measured = measure(tmp_path)
    assert 1 <= len(measured.syncs_s) <= self_test.SYNCS_MAX
    assert measured.file_system
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    inner = tmp_path / "a b"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    mounts.write_text(f"d / ext4 rw 0 0\nt {escaped} tmpfs rw 0 0\nx /proc proc rw 0 0\n")
    assert self_test.file_system(inner / "deeper", mounts) == "tmpfs"
    assert self_test.file_system(tmp_path, mounts) == "ext4"
    assert self_test.file_system(tmp_path, tmp_path / "no-such-file") == ""


def test_what_is_found_is_one_line_for_a_directory_and_a_failure_is_no_end(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(self_test, "file_system", lambda _: "tmpfs")
    with caplog.at_level(logging.WARNING):
        asyncio.run(self_test.run([("ledger", tmp_path), ("journal", tmp_path / "gone")]))
    assert len(caplog.messages) == 2
    assert "is in memory" in caplog.messages[0]
    assert "the sync test failed" in caplog.messages[1]
