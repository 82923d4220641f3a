"""A client that does not finish its request is cut off; one whose response takes long is not."""

import asyncio
import resource

import pytest
import uvicorn

from nautile.common.processes import listen
from nautile.flows.serve import http
from nautile.flows.serve.http import ImpatientProtocol

WHOLE = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def exchange(clients):
    """Serve an application that answers once `go` is set, and run `clients(port, go)` beside it."""

    async def run():
        go = asyncio.Event()

        async def application(scope, receive, send):
            while (await receive()).get("more_body"):
                pass
            await go.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        listener = listen("127.0.0.1", 0)
        config = uvicorn.Config(application, http=ImpatientProtocol, lifespan="off", log_level="critical")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await clients(listener.getsockname()[1], go)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_an_unfinished_request_ends_the_connection_and_a_finished_one_does_not(monkeypatch, sent):
    monkeypatch.setattr(http, "REQUEST_S", 1.0)  # longer than a busy machine stops a process

    async def clients(port, go):
        patient, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE)
        slow, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(sent)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await slow.readexactly(1)
        go.set()
        assert (await patient.readline()).startswith(b"HTTP/1.1 204")
        # The next request on the same connection has a time of its own.
        await patient.readuntil(b"\r\n\r\n")
        writer.write(WHOLE)
        assert (await patient.readline()).startswith(b"HTTP/1.1 204")
        await patient.readuntil(b"\r\n\r\n")
        writer.write(WHOLE[:-1])
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await patient.readexactly(1)

    exchange(clients)


def test_the_head_of_a_request_is_bounded():
    async def clients(port, go):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 300_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")

    exchange(clients)


def test_a_thousand_idle_connections_keep_nobody_out():
    http.raise_descriptor_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2_500:
        pytest.skip("this machine allows too few connections")

    async def clients(port, go):
        go.set()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1_000)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE)
        assert (await reader.readline()).startswith(b"HTTP/1.1 204")
        for _, writer in idle:
            writer.close()

    exchange(clients)
