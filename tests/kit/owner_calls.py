"""The ports of brokers, without a network: who commits past live segments asks through here."""

import asyncio

from spark_ledger.broker.committers import Held
from spark_ledger.topic.commit.hand_over import answer_within_s, decode_request

DELAY_S = 0.001


class OwnerCalls:
    """`brokers`: by URL who answers there, as a Broker does; at other URLs nobody listens."""

    def __init__(self):
        self.brokers = {}
        self.asked = []

    async def ask(self, url, request):
        await asyncio.sleep(DELAY_S)
        if url not in self.brokers:
            raise ConnectionRefusedError(f"nobody listens at {url}")
        lives, hold_s = decode_request(request)
        self.asked.append(lives)
        until_s = asyncio.get_running_loop().time() + hold_s
        held = Held(self.brokers[url], lives, until_s)
        try:
            answer = await held.answer(answer_within_s(hold_s, len(lives)))
            await asyncio.sleep(DELAY_S)
        except BaseException:
            held.let_go()
            raise
        return answer[4:], held.let_go
