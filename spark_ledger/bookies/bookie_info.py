"""What a bookie says of itself: one Info call, for people and for readiness probes.

Always true: a bookie is asked directly and by address; whether other bookies or the metadata store
are there plays no part.
"""

from bookie_server.api import codec
from bookie_server.api.messages import InfoRequest, InfoResponse
from bookie_server.api.status import Status
from spark_ledger.bookies.network import CallFailed, Network


async def ask(network: Network, address: str, timeout_s: float) -> InfoResponse:
    """The response of whatever bookie speaks frames at `address` ("host:port"). Raises
    CallFailed."""
    body = await network.call(address, "Info", (codec.encode(InfoRequest()),), timeout_s)
    try:
        response = codec.decode_response("Info", body)
    except codec.BadMessage as error:
        raise CallFailed(f"no bookie answers there: {error}") from error
    assert isinstance(response, InfoResponse)
    return response


def why_not_ready(response: InfoResponse) -> str:
    """Empty when the bookie is registered and takes new entries."""
    if response.status is Status.SHUTTING_DOWN:
        return "draining: it is stopping"
    if response.status is not Status.OK:
        return f"failed: {response.reason or response.status.name}"
    if response.state != "writable":
        return f"{response.state}: {response.reason}".rstrip(": ")
    return ""
