"""What a bounded memory of values keeps."""

from spark_ledger.process import LruCache


def kept(newest, keys):
    return [key for key in keys if newest.get(key) is not None]


def test_beyond_the_bound_the_value_that_was_used_longest_ago_goes():
    newest = LruCache[str, int](2)
    newest.put("a", 1)
    newest.put("b", 2)
    assert newest.get("a") == 1  # so "b" was used longest ago
    newest.put("c", 3)
    assert kept(newest, "abc") == ["a", "c"]
    newest.put("a", 4)  # so "c" was
    newest.put("d", 5)
    assert kept(newest, "abcd") == ["a", "d"]


def test_sizes_are_bounded_together_and_a_value_larger_than_the_bound_is_not_kept():
    newest = LruCache[str, bytes](10, len)
    newest.put("a", b"1234")
    newest.put("b", b"123456")
    assert (newest.size, kept(newest, "ab")) == (10, ["a", "b"])
    newest.put("b", b"1234567")
    assert (newest.size, kept(newest, "ab")) == (7, ["b"])
    newest.put("c", bytes(11))
    assert (newest.size, kept(newest, "abc")) == (0, [])


def test_a_value_that_is_taken_away_gives_its_size_back():
    newest = LruCache[str, bytes](10, len)
    newest.put("a", b"1234")
    assert (newest.pop("a"), newest.pop("a"), newest.size) == (b"1234", None, 0)
