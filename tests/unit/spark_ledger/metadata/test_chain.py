"""Links, which of them are kept, and what a disk concludes from one that is missing."""

import pytest

from spark_ledger.metadata import chain, paths
from spark_ledger.metadata.chain import Chain, is_kept, missing_link, newest_of_each_kind, with_link
from tests.simulation.loop import run
from tests.simulation.store import SimStore


def grown(links: int, began: Chain | None = None, mark: str = "t") -> Chain:
    """The chain with so many more links, whose tokens are their numbers after `mark`."""
    grown = began
    for _ in range(links):
        number = 0 if grown is None else grown.newest + 1
        grown = with_link(grown, f"{mark}{number}")
    assert grown is not None
    return grown


def test_a_chain_is_json_with_its_links_in_order():
    value = chain.encode(grown(3))
    assert value == b'{"format":1,"links":[[0,"t0"],[1,"t1"],[2,"t2"]]}'
    assert chain.decode(value) == grown(3)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b'{"format":2,"links":[[0,"t"]]}',
        b'{"format":1,"links":[]}',
        b'{"format":1,"links":[[1,"t"],[0,"t"]]}',
        b'{"format":1,"links":[[-1,"t"]]}',
        b'{"format":1,"links":[["x","t"]]}',
    ],
)
def test_what_is_no_chain_is_refused(value: bytes):
    with pytest.raises(chain.BadChain):
        chain.decode(value)


def test_links_are_dense_for_hours_and_sparse_with_age_for_400_days_in_less_than_20_kib():
    a_year = extended_by_numbers(400 * 24 * 60 + 5000)
    numbers = sorted(a_year.links)
    newest = a_year.newest
    assert numbers[-240:] == list(range(newest - 239, newest + 1))
    assert newest - numbers[0] >= 400 * 24 * 60 - 4096
    assert len(chain.encode(Chain(dict.fromkeys(numbers, "0123456789ab")))) < 20 * 1024
    assert numbers == [n for n in range(newest + 1) if is_kept(n, newest)]


def extended_by_numbers(links: int) -> Chain:
    """As `grown`, without so many copies."""
    newest = links - 1
    return Chain({n: f"t{n}" for n in range(links) if is_kept(n, newest)})


def test_thinning_link_by_link_keeps_what_the_rule_keeps():
    assert sorted(grown(1200).links) == [n for n in range(1200) if is_kept(n, 1199)]


def test_a_disk_keeps_the_newest_link_of_each_kind():
    assert newest_of_each_kind(grown(1)) == {0: "t0"}
    assert sorted(newest_of_each_kind(grown(600))) == [0, 512, 592, 599]


@pytest.mark.parametrize("away", [0, 1, 240, 241, 600, 2880, 2882, 43_300, 575_000, 1_200_000])
def test_a_disk_knows_its_store_again_however_long_it_was_away(away: int):
    seen = newest_of_each_kind(extended_by_numbers(600))
    assert missing_link(seen, extended_by_numbers(600 + away)) is None


def test_an_older_store_misses_the_newest_link():
    seen = newest_of_each_kind(grown(20))
    assert missing_link(seen, grown(11)) == 19
    assert missing_link(seen, None) == 19


def test_a_store_that_was_used_on_since_is_another_as_long_as_links_so_old_are_kept():
    copy = grown(300)
    seen = newest_of_each_kind(grown(22, copy))
    for links in (1, 21, 22, 23, 40, 200, 240):
        assert missing_link(seen, grown(links, copy, "other")) is not None, links


def test_a_store_that_was_used_on_for_days_is_another_by_an_older_link_of_the_disk():
    """Links as new as the newest that the disk saw are kept no more."""
    copy = Chain({n: f"t{n}" for n in range(300) if is_kept(n, 299)})
    seen = newest_of_each_kind(extended_by_numbers(600))
    newest = 4300
    links = {n: copy.links.get(n, f"other{n}") for n in range(newest + 1) if is_kept(n, newest)}
    assert not is_kept(max(seen), newest)
    assert missing_link(seen, Chain(links)) == 512


def test_a_copy_made_after_the_newest_link_that_was_seen_is_the_same_store():
    copy = grown(300)
    assert missing_link(newest_of_each_kind(copy), grown(40, copy, "other")) is None


def test_one_process_appends_a_link_when_no_other_did_for_a_while():
    async def act() -> None:
        store, now = SimStore(), [0.0]
        session = store.session("maintenance")
        extender = chain.Extender(session, 300.0, lambda: now[0])
        await extender.once()  # an existing cluster gets its first link
        numbers = []
        for minute in range(11):
            now[0] = 60.0 * minute
            await extender.once()
            numbers.append(chain.decode(store.peek(paths.CHAIN).value).newest)
        assert numbers == [0] * 5 + [1] * 5 + [2]

    run(act(), seed=1)


def test_of_processes_that_append_at_once_one_does():
    async def act() -> None:
        store, now = SimStore(), [0.0]
        sessions = [store.session(f"bookie {n}") for n in range(3)]
        extenders = [chain.Extender(one, 900.0, lambda: now[0]) for one in sessions]
        for now[0] in (0.0, 1.0, 1000.0):
            for one in extenders:
                await one.once()
        assert chain.decode(store.peek(paths.CHAIN).value).newest == 1

    run(act(), seed=1)
