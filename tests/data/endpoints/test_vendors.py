"""A vendor is one entry of `VENDORS`: its name stands nowhere else, and one more entry is one more vendor."""

import ast
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from nautile.configs.distill import EmbeddingConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.vendors import VENDORS
from nautile.data.endpoints.chat_types import ChatReply, ChatRequest
from nautile.data.retrieval.embedders import encoder_for
from tests.support.plug_ins import add_plug_in
from tests.support.servers.fake_embeddings import FakeEmbeddings
from tests.support.servers.fake_openai import FakeOpenAI

ROOT = Path(__file__).parents[3]
PACKAGES = ("common", "configs", "data", "model", "evals", "rl", "tasks", "flows", "uses", "store")
SDKS = {"openai", "mistralai"}
OF_VENDORS = {"configs/vendors.py", "data/endpoints/openai_client.py", "data/endpoints/mistral_client.py"}
OF_VENDORS.add("rl/checker.py")  # the program itself


def test_no_other_module_names_a_vendor_or_imports_its_sdk():
    paths = {str(path.relative_to(ROOT)): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    elsewhere = []
    for name in paths.keys() - OF_VENDORS:
        text = paths[name].read_text(encoding="utf-8")
        named = any(word in text.lower() for word in SDKS.union(VENDORS))
        for node in ast.walk(ast.parse(text)) if named else ():
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() in VENDORS:
                elsewhere.append(f"{name}:{node.lineno}: {node.value!r}")
            elsewhere += [f"{name}:{node.lineno}: imports {m}" for m in modules if m.split(".")[0] in SDKS]
    assert not elsewhere


@pytest.mark.parametrize("name", VENDORS)
def test_the_references_of_a_vendor_exist(name):
    vendor = VENDORS[name]
    for reference in filter(None, (vendor.client, vendor.embeddings, vendor.program)):
        assert pkgutil.resolve_name(reference)


ACME = """
from nautile.configs.vendors import Vendor

acme = Vendor(url={url!r}, needs_key=True, seed_field="acme_seed", client="plugged_acme:Client")
asked = []


def __getattr__(name):  # the class of its clients, made when it is used: the SDK takes a second to import
    if name != "Client":
        raise AttributeError(name)
    from nautile.data.endpoints.openai_client import OpenAIClient

    class Client(OpenAIClient):
        async def complete(self, request):
            asked.append(request.endpoint)
            return await super().complete(request)

    return Client
"""


def test_one_more_entry_is_one_more_vendor(monkeypatch, tmp_path, pool_for):
    """With an address, a form and a client of its own, for chat completions and for embeddings."""
    with FakeOpenAI() as server, FakeEmbeddings() as embeddings:
        vectors = f"from nautile.configs.vendors import Vendor\nvectors = Vendor(url={embeddings.url!r})"
        add_plug_in(monkeypatch, tmp_path, VENDORS, "vectors", vectors)
        add_plug_in(monkeypatch, tmp_path, VENDORS, "acme", ACME.format(url=server.url))
        monkeypatch.setenv("ACME_KEY", "sk-acme-0123456789")
        with pytest.raises(ValueError, match="kind 'acme' has no batch interface"):
            EndpointConfig(kind="acme", model="fake", mode="batch")
        pool = pool_for(fake=EndpointConfig(kind="acme", model="fake", key_variable="ACME_KEY"))
        pool.check()
        (reply,) = pool.ask([ChatRequest("fake", ({"role": "user", "content": "hello"},), 20, seed=7)])
        assert isinstance(reply, ChatReply)
        assert server.bodies[0]["acme_seed"] == 7
        assert sys.modules["plugged_acme"].asked == ["fake"]
        with pytest.raises(ValueError, match="`extra` may not set acme_seed"):
            EndpointConfig(kind="acme", model="fake", extra={"acme_seed": 1})
        encoder = encoder_for(EmbeddingConfig(kind="vectors", model="m", width=embeddings.width))
        assert encoder.encode(["one"]).shape == (1, embeddings.width)


@pytest.mark.slow
def test_a_plug_ins_module_is_imported_before_the_project_and_is_in_no_key(tmp_path):
    """Nothing is asked or paid for again because a vendor's source has changed."""
    program = (
        "import sys, acme\nfrom nautile.configs.load import load; from nautile.flows.dag import build_dag\n"
        "change = ['endpoints.smollm2.kind=\"acme\"', 'endpoints.smollm2.url=\"http://127.0.0.1:9/v1\"']\n"
        "sys.stdout.write(next(s.key for s in build_dag(load('local', change)) if s.label == 'distill'))"
    )
    keys = set()
    for seed in ("seed", "acme_seed"):
        text = f"from nautile.configs.vendors import Vendor\n\nacme = Vendor(seed_field={seed!r})\n"
        (tmp_path / "acme.py").write_text(text, encoding="utf-8")
        environment = {**os.environ, "NAUTILE_PLUGINS": "vendors=acme:acme", "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout)
    assert len(keys) == 1
    assert len(keys.pop()) == 64
