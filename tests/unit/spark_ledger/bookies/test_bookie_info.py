import asyncio

import pytest

from bookie_server.api import codec
from bookie_server.api.messages import InfoResponse
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import CallFailed, ask_info, why_not_ready


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (InfoResponse(Status.OK, "b", "writable"), ""),
        (InfoResponse(Status.OK, "", "starting"), "starting"),
        (InfoResponse(Status.OK, "b", "readonly", "disk full: /a"), "readonly: disk full: /a"),
        (InfoResponse(Status.OK, "b", "draining"), "draining"),
        (InfoResponse(Status.SHUTTING_DOWN), "draining: it is stopping"),
        (InfoResponse(Status.IO_ERROR, reason="EIO"), "failed: EIO"),
    ],
)
def test_a_bookie_is_ready_when_it_is_registered_and_takes_entries(response, why: str):
    assert why_not_ready(response) == why


class Network:
    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    async def call(self, address, method, request, timeout_s) -> bytes:
        assert (address, method, timeout_s) == ("b:1", "Info", 2.0)
        return self.answer

    async def close(self) -> None: ...


def test_what_a_bookie_answers_is_decoded_and_what_no_bookie_answers_is_no_answer():
    said = InfoResponse(Status.OK, "b", "writable", free_bytes=3)
    answer = asyncio.run(ask_info(Network(codec.encode(said)), "b:1", 2.0))
    assert (answer.bookie_id, answer.free_bytes) == ("b", 3)
    with pytest.raises(CallFailed, match="no bookie answers there"):
        asyncio.run(ask_info(Network(b"\xff\xff\xff"), "b:1", 2.0))
