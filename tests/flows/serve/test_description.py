"""The server's OpenAPI description against the server in process, by schemathesis."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.python.asgi import get_client

from tests.support.samples.instant_engine import instant_application

pytestmark = pytest.mark.slow
APP = instant_application()
api = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(scope="module")
def session():
    with get_client(APP) as client:
        yield client


@api.parametrize()
@hypothesis.settings(max_examples=10, database=None, suppress_health_check=list(HealthCheck))
def test_each_answer_is_as_described(case, session):
    """No status, type or body that the description does not have, nothing of 500, and no wrong request accepted."""
    case.call_and_validate(
        session=session,
        excluded_checks=[
            # What a schema cannot say is refused: one question, a context that is long enough.
            schemathesis.checks.CHECKS.get_one("positive_data_acceptance"),
        ],
    )


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": "1 + 1 ="}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1 + 1?"}]}),
    ],
)
def test_each_streamed_answer_is_as_described(path, question, session):
    """Drawn requests rarely ask for a stream; these do."""
    case = api[path]["POST"].Case(media_type="application/json", body={**question, "stream": True, "max_tokens": 4})
    response = case.call_and_validate(session=session)
    assert response.headers["content-type"][0].startswith("text/event-stream")
