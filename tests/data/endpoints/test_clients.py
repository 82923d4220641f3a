"""The bodies of HTTP responses as the vendors' clients read them."""

import asyncio
import gzip
import zlib

import httpx2
import pytest

from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints import clients
from tests.support.servers.http_server import FakeServer, Response

BODY = b"".join(b"%d, " % number for number in range(20_000))


class Packed(FakeServer):
    """Answers with one body."""

    def __init__(self, response):
        self._response = response

    def respond(self, request):
        return self._response


def read(body, encoding="gzip"):
    async def get():
        (client,) = clients.http_clients(endpoint, lambda headers: None)
        async with client:
            return (await client.get(server.url)).content

    with Packed(Response(200, body, "application/json", {"Content-Encoding": encoding})) as server:
        endpoint = EndpointConfig(kind="openai", model="fake", url=server.url, concurrency=1)
        return asyncio.run(get())


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP"])
@pytest.mark.parametrize("members", [1, 2, 50])
def test_all_members_of_a_gzip_body_are_read(encoding, members):
    size = -(-len(BODY) // members)
    parts = [gzip.compress(BODY[start : start + size]) for start in range(0, len(BODY), size)]
    assert read(b"".join(parts), encoding) == BODY


def test_members_are_told_apart_wherever_a_piece_ends(monkeypatch):
    monkeypatch.setattr(clients, "PIECE", 7)
    assert read(gzip.compress(b"") + gzip.compress(BODY) * 2) == BODY * 2


@pytest.mark.parametrize("end", [b"", b"\0" * 512, b"\n"])
def test_what_pads_a_gzip_body_is_left_out(end):
    assert read(gzip.compress(BODY) + end) == BODY


def test_a_damaged_body_is_an_error():
    with pytest.raises(httpx2.DecodingError):
        read(gzip.compress(BODY)[:500] + b"damage" * 100)


def test_a_small_body_that_holds_more_than_any_reply_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(clients, "MOST_CONTENT", 2 << 20)
    assert len(read(gzip.compress(b"\0" * (2 << 20)))) == 2 << 20
    with pytest.raises(httpx2.DecodingError, match="more than 2097152 bytes"):
        read(gzip.compress(b"\0" * (1 << 20)) * 3)
    for body, encoding in ((zlib.compress(b"\0" * (3 << 20)), "deflate"), (b"\0" * (3 << 20), "identity")):
        with pytest.raises(httpx2.DecodingError, match="more than"):
            read(body, encoding)


def test_deflate_is_read_with_its_header_and_without():
    without = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    assert read(zlib.compress(BODY), "deflate") == read(without.compress(BODY) + without.flush(), "deflate") == BODY
