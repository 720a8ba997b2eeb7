"""Only spark_ledger/net.py dials and listens; of libraries those that are listed here."""

import ast

from tests.tidy.sources import Source, source, sources

PLACE = "spark_ledger/net.py"
CALLS = (
    *("socket", "create_connection", "open_connection", "open_unix_connection", "sock_connect"),
    *("create_datagram_endpoint", "urlopen", "insecure_channel", "secure_channel", "KazooClient"),
    "ClientSession",
    *("create_server", "create_unix_server", "start_server", "start_unix_server"),
    *("connect_accepted_socket", "add_insecure_port", "add_secure_port"),
)
"""Functions and classes that make connections or listeners."""
MODULES = (
    "ssl",
    "http.client",
    "http.server",
    "socketserver",
    "urllib.request",
    "xmlrpc",
    "ftplib",
)
EXCEPTIONS = {
    ("spark_ledger/metadata/zookeeper.py", "KazooClient"): "kazoo makes ZooKeeper's connections",
    ("spark_ledger/metadata/zookeeper.py", "create_connection"): "kazoo's handler, with a deadline",
    ("spark_ledger/http.py", "ClientSession"): "aiohttp dials by itself",
    ("bookie_server/serve/gateway.py", "add_insecure_port"): "the gRPC library listens by itself",
}


def _made(source: Source) -> set[tuple[str, str]]:
    """The names in CALLS that the file calls, and the modules of MODULES that it imports."""
    calls = (node.func for node in source.nodes if isinstance(node, ast.Call))
    names = {
        call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls
    }
    modules = {module for module, _ in source.imports if module in MODULES}
    return {(source.path, name) for name in (names & set(CALLS)) | modules}


def test_connections_and_listeners_are_made_in_one_place():
    made = {made for source in sources() if source.path != PLACE for made in _made(source)}
    assert made == set(EXCEPTIONS)


def test_that_place_makes_both():
    made = {name for _, name in _made(source(PLACE))}
    assert {"socket", "open_connection", "sock_connect", "connect_accepted_socket"} <= made


def test_a_call_by_any_of_these_names_is_noticed():
    text = "import http.client\n" + "\n".join(f"a.b.{name}(1)" for name in CALLS)
    made = _made(Source("x.py", text, ast.parse(text)))
    assert {name for _, name in made} == {"http.client", *CALLS}
