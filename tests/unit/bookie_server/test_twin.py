import json
import random

import pytest

from bookie_server.disk.identity import WrongDisks
from bookie_server.serve.registration import refuse_beside_twin
from spark_ledger.metadata import paths
from tests.simulation.loop import run
from tests.simulation.store import SimStore

ID, HERE, THERE, FRAMES = "b1", "host:1", "host:2", "host:7"


def starts(folder: str, registered: str, answers: str, frames: str = FRAMES) -> list[str]:
    """Start at HERE while `registered` is in the store; returns who was asked."""
    asked: list[str] = []

    async def scenario() -> None:
        store = SimStore(random.Random(1))
        record = json.dumps({"address": registered, "frames": frames}).encode()
        before = store.session("before")
        await before.create(f"{folder}/{ID}", record, ephemeral=True, parents=True)

        async def who_is(address: str) -> str:
            asked.append(address)
            return answers

        await refuse_beside_twin(store.session("now"), ID, HERE, who_is)

    run(scenario(), seed=1)
    return asked


@pytest.mark.parametrize("folder", [paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY])
def test_a_bookie_that_answers_elsewhere_to_our_id_refuses_us_the_start(folder):
    with pytest.raises(WrongDisks, match=f"running already, at {THERE}"):
        starts(folder, THERE, ID)


@pytest.mark.parametrize("answers", ["", "b2"])
def test_a_predecessor_who_does_not_answer_as_us_is_dead(answers):
    assert starts(paths.BOOKIES_AVAILABLE, THERE, answers) == [FRAMES]


def test_a_predecessor_that_registered_no_frames_cannot_be_asked_and_may_run_still():
    with pytest.raises(WrongDisks, match=f"running already, at {THERE}"):
        starts(paths.BOOKIES_AVAILABLE, THERE, "", frames="")


def test_our_own_address_is_not_asked():
    assert starts(paths.BOOKIES_AVAILABLE, HERE, ID) == []
