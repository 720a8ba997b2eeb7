"""A metadata store that counts its calls."""

CALLS = ("get", "children", "sync", "create", "set", "delete", "multi")


class Counted:
    """Counts what a client asks of its session; `multis` has the operations of each multi."""

    def __init__(self, client):
        self.calls = {}
        self.multis = []
        for name in CALLS:
            setattr(client.store, name, self._counting(name, getattr(client.store, name)))

    def _counting(self, name, call):
        async def counted(*arguments, **options):
            self.calls[name] = self.calls.get(name, 0) + 1
            if name == "multi":
                self.multis.append(list(arguments[0]))
            return await call(*arguments, **options)

        return counted

    def taken(self):
        calls, self.calls = self.calls, {}
        return calls
