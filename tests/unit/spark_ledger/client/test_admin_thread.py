"""What of a client's parts spark_ledger.Admin touches on its caller's thread: nothing."""

import threading
from types import SimpleNamespace

import pyarrow as pa

from spark_ledger.client.admin import Admin
from spark_ledger.topic import blocking


class Parts:
    """A topic client that notes on which threads its parts are asked for."""

    def __init__(self):
        self.threads = []
        self.topics = SimpleNamespace(open=self._open)

    async def _open(self, topic):
        return SimpleNamespace(id=topic)

    def __getattr__(self, name):
        self.threads.append(threading.current_thread())
        return Part()


class Part:
    def __getattr__(self, name):
        async def call(*some, **options):
            return name

        return call


def test_parts_of_the_client_are_made_on_the_loop_to_which_they_belong(monkeypatch):
    parts = Parts()
    monkeypatch.setattr(blocking, "topics", lambda _: SimpleNamespace(client=parts))
    admin = Admin()
    assert admin.create_subscription("t", "s") == "create"
    assert admin.subscriptions("t") == "list"
    assert admin.seek("t", "s", "earliest") == "seek"
    assert admin.schema("t") == "of"
    assert admin.register_schema("t", pa.schema([])) == "register"
    admin.set_compatibility("t", "none")
    assert len(parts.threads) == 6
    assert threading.current_thread() not in parts.threads
