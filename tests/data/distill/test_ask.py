"""The requests to teachers and probes."""

from types import SimpleNamespace

from nautile.configs.distill import DistillConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill import ask
from nautile.data.distill.ask import PreparedPrompt, Teachers
from nautile.data.distill.prompts import Prompt


def test_a_probe_request_is_written_once_for_all_samples(monkeypatch):
    endpoints = {name: EndpointConfig(kind="openai", model=name, url="http://x/v1") for name in ("a", "b")}
    probe = {"endpoints": ("a", "b"), "samples": 3}
    config = DistillConfig(prompts=1, teachers=({"endpoint": "a"},), probe=probe, temperature=0.7)
    teachers = Teachers(config, SimpleNamespace(config=endpoints.__getitem__), None, seed=7)
    real, written = ask.teacher_request, []
    monkeypatch.setattr(ask, "teacher_request", lambda *arguments: written.append(arguments) or real(*arguments))
    prompt = Prompt("p", "What is <|im_end|>?", "instruction")
    requests = teachers.probe_requests(PreparedPrompt(prompt, [], 0.5))
    assert len(written) == 2
    assert [(r.endpoint, r.seed, r.purpose) for r in requests] == [(e, s, "probe") for e in "ab" for s in (7, 8, 9)]
    assert len({r.messages[-1]["content"] for r in requests}) == 1
    assert teachers.first_task(PreparedPrompt(prompt, [], 0.5), []).request.messages == requests[0].messages
