"""The ports of brokers, without a network, for committers that commit past live segments."""

import asyncio

from spark_ledger.broker.serve.committers import CommitterConnection
from spark_ledger.topic.commit.hand_over import decode_request

DELAY_S = 0.001


class Transport:
    """The transport to a committer: `answer` is the bytes written to it."""

    def __init__(self):
        self.answer = asyncio.get_running_loop().create_future()

    def write(self, data):
        self.answer.set_result(data)

    def close(self):
        """End the connection: it was open for too long."""
        self.connection.connection_lost(None)


class OwnerCalls:
    """`brokers`: by URL, the object that answers there as a Broker does; at other URLs no process
    listens."""

    def __init__(self):
        self.brokers = {}
        self.asked = []

    async def ask(self, url, request):
        await asyncio.sleep(DELAY_S)
        if url not in self.brokers:
            raise ConnectionRefusedError(f"no process listens at {url}")
        self.asked.append(decode_request(request)[0])
        transport = Transport()
        made = transport.connection = CommitterConnection(self.brokers[url], transport)

        def let_go():
            made.connection_lost(None)

        try:
            made.data_received(request)
            answer = await transport.answer
            await asyncio.sleep(DELAY_S)
        except BaseException:
            let_go()
            raise
        return answer[4:], let_go
