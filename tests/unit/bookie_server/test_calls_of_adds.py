"""What a frame of small adds costs a bookie: no call of a Python function for each of them."""

from bookie_server.api import codec
from bookie_server.api import messages as m
from tests.kit.handling import handle_bytes
from tests.kit.python_calls import calls_counted, calls_that_grow
from tests.simulation.loop import run
from tests.unit.bookie_server.node import ID, Node, entry

FEW, MANY = 10, 110


def test_a_bookie_calls_no_function_for_each_small_add_of_a_frame():
    async def calls_of(node: Node, first: int, count: int):
        adds = [m.Add([entry(1, first + i, bytes(100))], False, b"") for i in range(count)]
        frame = codec.encode(m.AddRequest(ID, adds))
        with calls_counted() as calls:
            response = codec.decode_response("Add", await handle_bytes(node.bookie, "Add", frame))
        assert response.results == [m.AddResult(m.Status.OK)] * count
        return calls

    async def both():
        node = await Node().start()
        await node.create_ledger(1)
        await node.add_all(entry(1, 0))
        few = await calls_of(node, 1, FEW)
        return few, await calls_of(node, 1 + FEW, MANY)

    assert calls_that_grow(*run(both()), MANY - FEW) == {}
