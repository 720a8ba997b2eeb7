"""Files of a bookie of this host, and every harm that may come to them."""

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import EntryHeader, pack_header, payload_crc, unpack_entry
from bookie_server.api.messages import ids_in
from bookie_server.api.status import Status, StopReason
from spark_ledger.bookies.bookie_client import BookieClient, CallFailed
from spark_ledger.config import ClientConfig
from tests.kit.forward import run

BOOKIE, OTHER = "6d0f0b0c-0000-4000-8000-000000000001", "6d0f0b0c-0000-4000-8000-000000000002"


IDENTITY = f"spark-ledger-bookie 2 {BOOKIE} cluster directory 00000000\n"


FILE = "entrylog/0000000001.log"


LEDGER, COUNT, LAC, BEFORE, GAP = 7, 6, 4, 64, 48


LARGE, SMALL, ABSENT = 5000, 100, 3


def entry(entry_id: int, size: int = LARGE, ledger_id: int = LEDGER) -> bytes:
    payload = bytes([entry_id]) * size
    header = EntryHeader(ledger_id, entry_id, -1, size, entry_id + 1, size, payload_crc([payload]))
    return pack_header(header) + payload


class Bookie:
    """A network with one bookie behind it, which is here and has its entries in one file; entry 0
    is small, entry ABSENT is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / FILE
        self.entries = {n: entry(n, LARGE if n else SMALL) for n in range(COUNT) if n != ABSENT}
        self.locations: dict[int, m.EntryLocation] = {}
        self.asked: list[bool] = []
        """Of each request, whether it was for locations."""
        self.closed = False
        self.tells_ahead = True
        self.write()

    def write(self) -> None:
        """As it should be."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / m.IDENTITY_FILE).write_text(IDENTITY)
        data = bytes(BEFORE)
        for number, each in self.entries.items():
            if number:
                location = m.EntryLocation(str(self.folder), FILE, len(data), len(each))
                self.locations.setdefault(number, location)
            data += each + bytes(GAP)
        self.file.write_bytes(data)

    def is_here(self, _: str) -> bool:
        return True

    def address(self, _: str) -> str:
        return "here:1"

    async def call(self, address, method, request, timeout_s) -> bytes:
        await asyncio.sleep(0)
        if self.closed:
            raise CallFailed("closed")
        read = codec.decode_request(method, b"".join(request))
        self.asked.append(read.locations)
        results = [self.result(number, read.locations) for number in ids_in(read.spans, COUNT)]
        response = m.ReadResponse(Status.OK, results, LAC, StopReason.END_OF_RANGE)
        later = ids_in(read.ahead, COUNT) if self.tells_ahead else ()
        known = itertools.takewhile(self.locations.__contains__, later)
        return codec.encode(response._replace(ahead=[self.locations[n] for n in known]))

    def result(self, number: int, locate: bool) -> m.EntryResult:
        if number not in self.entries:
            return m.EntryResult(Status.NO_SUCH_ENTRY)
        if locate and number in self.locations:
            return m.EntryResult(Status.OK, location=self.locations[number])
        return m.EntryResult(Status.OK, self.entries[number])

    async def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self, folder: Path) -> None:
        self.bookie = Bookie(folder)
        self.client = BookieClient(self.bookie, self.bookie, ClientConfig())
        self.locations: dict[int, m.EntryLocation] = {}

    async def read(
        self, first: int = 0, last: int = COUNT - 1, *, local: bool = True, **more
    ) -> m.ReadResponse:
        more = {"max_bytes": 1 << 20, "locations": self.locations if local else None, **more}
        return await self.client.read(BOOKIE, LEDGER, first, last, **more)

    async def asked(self) -> list[bool]:
        """What a read asks the bookie for, one after the other; its answer is as it should be."""
        self.bookie.asked.clear()
        assert said(await self.read()) == said(await self.read(local=False))
        return self.bookie.asked[:-1]


def said(response: m.ReadResponse) -> tuple:
    """Everything that an answer says."""
    found = []
    for result in response.results:
        assert result.location is None
        there = result.status is Status.OK
        one = (result.checked or unpack_entry(result.entry)) if there else None
        found.append((result.status, one and one.header, one and bytes(one.payload)))
    return (response.status, found, response.last_add_confirmed, response.stop)


def on_this_host(test: Callable, folder: Path) -> None:
    async def main() -> None:
        rig = Rig(folder)
        await test(rig)
        await rig.client.close()

    run(main())


def gone(bookie: Bookie) -> None:
    os.rename(bookie.file, bookie.file.with_suffix(".kept"))


def no_directory(bookie: Bookie) -> None:
    bookie.folder.rename(bookie.folder.with_suffix(".kept"))


def no_identity(bookie: Bookie) -> None:
    (bookie.folder / m.IDENTITY_FILE).unlink()


def of_another_bookie(bookie: Bookie) -> None:
    (bookie.folder / m.IDENTITY_FILE).write_text(IDENTITY.replace(BOOKIE, OTHER))


def a_folder_instead(bookie: Bookie) -> None:
    bookie.file.unlink()
    bookie.file.mkdir()


def a_link_to_nothing(bookie: Bookie) -> None:
    bookie.file.unlink()
    bookie.file.symlink_to("nothing")


def a_pipe_instead(bookie: Bookie) -> None:
    bookie.file.unlink()
    os.mkfifo(bookie.file)


def a_pipe_as_identity(bookie: Bookie) -> None:
    no_identity(bookie)
    os.mkfifo(bookie.folder / m.IDENTITY_FILE)


def not_permitted(bookie: Bookie) -> None:
    bookie.file.chmod(0)
    if os.access(bookie.file, os.R_OK):
        pytest.skip("whoever runs this may read every file")


def cut(bookie: Bookie) -> None:
    os.truncate(bookie.file, bookie.file.stat().st_size - GAP - 1)


def damage(bookie: Bookie) -> None:
    data = bytearray(bookie.file.read_bytes())
    data[bookie.locations[COUNT - 1].position + 1000] ^= 1
    bookie.file.write_bytes(data)


def damaged_header(bookie: Bookie) -> None:
    data = bytearray(bookie.file.read_bytes())
    data[bookie.locations[2].position + 20] ^= 1
    bookie.file.write_bytes(data)


def another_entry(bookie: Bookie) -> None:
    data = bookie.file.read_bytes()
    bookie.file.write_bytes(data.replace(bookie.entries[2], entry(8)))


def of_another_ledger(bookie: Bookie) -> None:
    data = bookie.file.read_bytes()
    bookie.file.write_bytes(data.replace(bookie.entries[2], entry(2, ledger_id=LEDGER + 1)))


def lies(**wrong: object) -> Callable[[Bookie], None]:
    """What the bookie says is nowhere."""

    def lie(bookie: Bookie) -> None:
        bookie.locations[2] = bookie.locations[2]._replace(**wrong)

    return lie


HARMS = [
    gone, no_directory, no_identity, of_another_bookie, a_folder_instead, a_link_to_nothing,
    a_pipe_instead, a_pipe_as_identity, not_permitted, cut, damage, damaged_header, another_entry,
    of_another_ledger,
]  # fmt: skip


LIES = [
    {"position": -1}, {"position": 2**62}, {"entry_bytes": 0}, {"entry_bytes": 63},
    {"file": "no\0file"}, {"directory": "no\0folder"}, {"directory": ""}, {"file": ""},
]  # fmt: skip
