"""Requests to the admin API of a broker of a simulated cluster."""

import json
import re
from collections.abc import AsyncIterator

from spark_ledger.broker.serve.routes import routes
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.http import HttpRequest
from tests.unit.spark_ledger.broker.two_brokers import Brokers
from tests.unit.spark_ledger.topic.stage import play

HEADERS = {"host": "127.0.0.1:8080", "content-type": "application/json"}


class Asked:
    """Asks one broker, as aiohttp would give it requests."""

    def __init__(self, broker, **settings):
        self.made = routes(lambda: broker, DEFAULTS.model_copy(update=settings))

    async def __call__(self, method, path, body=None, *, peer="127.0.0.1", headers=HEADERS):
        """The status and the JSON of the response."""
        path, _, query = path.partition("?")
        pairs = dict(pair.split("=") for pair in query.split("&") if pair)
        content = b"" if body is None else body if isinstance(body, bytes) else _json(body)
        for route in self.made:
            pattern = re.sub(r"{(\w+)(:[^}]*)?}", _group, route.path)
            match = re.fullmatch(pattern, path)
            if match and route.method in (method, "*"):
                asked = HttpRequest(
                    method, path, match.groupdict(), pairs, headers, content, peer, "10.0.0.1"
                )
                response = await route.handle(asked)
                if isinstance(response.body, AsyncIterator):
                    pieces = [piece async for piece in response.body]
                    return response.status, json.loads(b"".join(pieces))
                return response.status, response.body
        raise AssertionError(path)


def _group(match):
    return f"(?P<{match[1]}>.*)" if match[2] else f"(?P<{match[1]}>[^/]+)"


def _json(body):
    return json.dumps(body).encode()


def at_a_broker(act, **settings):
    async def main(stage):
        broker = await Brokers(stage).new("a")
        await act(Asked(broker, **settings), broker, stage)

    play(main)
