"""The ports of brokers, without a network: who commits past live segments asks through here."""

import asyncio

from spark_ledger.broker.serve.committers import CommitterConnection
from spark_ledger.topic.commit.hand_over import decode_request

DELAY_S = 0.001


class Transport:
    """To a committer: `answer` is what is written to it."""

    def __init__(self):
        self.answer = asyncio.get_running_loop().create_future()

    def write(self, data):
        self.answer.set_result(data)

    def close(self):
        """It was open for too long."""
        self.connection.connection_lost(None)


class OwnerCalls:
    """`brokers`: by URL who answers there, as a Broker does; at other URLs nobody listens."""

    def __init__(self):
        self.brokers = {}
        self.asked = []

    async def ask(self, url, request):
        await asyncio.sleep(DELAY_S)
        if url not in self.brokers:
            raise ConnectionRefusedError(f"nobody listens at {url}")
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
