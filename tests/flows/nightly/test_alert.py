"""The webhook against a real server: taken, tried again, given up; its URL is in no log and no message."""

import logging

import pytest

from common.processes import free_port
from flows.nightly.alert import PAUSES_S, post
from tests.support.fake_webhook import SECRET, FakeWebhook


@pytest.fixture
def told(monkeypatch, caplog):
    """told(url) -> (what `post` said, the pauses it made); checks that the secret is nowhere."""

    def tell(url):
        monkeypatch.setenv("HOOK", url)
        pauses = []
        with caplog.at_level(logging.DEBUG, "flows"), caplog.at_level(logging.INFO, "httpx"):
            said = post("HOOK", {"event": "nautile.regression"}, pauses.append)
        assert SECRET not in f"{said} {caplog.text}"
        return said, pauses

    return tell


def test_it_is_told_once_if_it_listens(told):
    with FakeWebhook(204) as webhook:
        assert told(webhook.secret_url) == (None, [])
    assert webhook.messages == [{"event": "nautile.regression"}]


def test_what_may_pass_is_tried_again(told):
    with FakeWebhook(503, 429, 200) as webhook:
        assert told(webhook.secret_url) == (None, list(PAUSES_S))
    assert len(webhook.messages) == 3


@pytest.mark.parametrize(("status", "attempts"), [(500, 3), (404, 1), (302, 1)])
def test_it_gives_up_and_says_so(told, status, attempts):
    with FakeWebhook(status) as webhook:
        said, _ = told(webhook.secret_url)
    assert said == f"the webhook in HOOK was not taken: status {status}"
    assert len(webhook.messages) == attempts


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"http://127.0.0.1:{free_port()}/{SECRET}", "ConnectError"),
        (f"ftp://127.0.0.1/{SECRET}", "UnsupportedProtocol"),
        (f"http://[::1/{SECRET}", "is it a whole URL"),
        ("", "HOOK is not set"),
    ],
    ids=["nobody", "ftp", "torn", "unset"],  # a port in an id is another one in each of the suite's processes
)
def test_what_cannot_be_reached_never_raises(told, url, said):
    assert said in told(url)[0]
