"""The webhook against a real server: accepted, retried, given up; its URL is in no log and no message."""

import logging

import pytest

from common.processes import free_port
from flows.nightly.alert import post_webhook
from tests.support.fake_webhook import SECRET, FakeWebhook


@pytest.fixture
def call(monkeypatch, caplog):
    """call(url) -> (what `post_webhook` returned, the pauses it made); checks that the secret is nowhere."""

    def call(url):
        monkeypatch.setenv("HOOK", url)
        pauses = []
        with caplog.at_level(logging.DEBUG, "flows"), caplog.at_level(logging.INFO, "httpx"):
            problem = post_webhook("HOOK", {"event": "nautile.regression"}, pauses.append)
        assert SECRET not in f"{problem} {caplog.text}"
        return problem, pauses

    return call


def test_an_accepted_message_is_sent_once(call):
    with FakeWebhook(204) as webhook:
        assert call(webhook.secret_url) == (None, [])
    assert webhook.messages == [{"event": "nautile.regression"}]


def test_a_temporary_failure_is_retried(call):
    with FakeWebhook(503, 429, 200) as webhook:
        assert call(webhook.secret_url) == (None, [1.0, 4.0])
    assert len(webhook.messages) == 3


@pytest.mark.parametrize(("status", "attempts"), [(500, 3), (404, 1), (302, 1)])
def test_it_gives_up_with_the_status(call, status, attempts):
    with FakeWebhook(status) as webhook:
        problem, _ = call(webhook.secret_url)
    assert problem == f"the webhook in HOOK failed: status {status}"
    assert len(webhook.messages) == attempts


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://127.0.0.1:{free_port()}/{SECRET}", "ConnectError"),
        (f"ftp://127.0.0.1/{SECRET}", "UnsupportedProtocol"),
        (f"http://[::1/{SECRET}", "is it a whole URL"),
        ("", "HOOK is not set"),
    ],
    ids=["nobody", "ftp", "torn", "unset"],  # a port in an id would differ between the processes of the test run
)
def test_a_webhook_that_cannot_be_reached_raises_nothing(call, url, message):
    assert message in call(url)[0]
