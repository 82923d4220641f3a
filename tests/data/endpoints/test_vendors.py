"""A vendor is one entry of `VENDORS`: its name stands nowhere else, and one more entry is one more vendor."""

import ast
import pkgutil
from pathlib import Path

import pytest

from nautile.configs.distill import EmbeddingConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.vendors import VENDORS, Vendor
from nautile.data.endpoints.chat_types import ChatReply, ChatRequest
from nautile.data.retrieval.embedders import encoder_for
from tests.support.servers.fake_embeddings import FakeEmbeddings
from tests.support.servers.fake_openai import FakeOpenAI

ROOT = Path(__file__).parents[3]
PACKAGES = ("common", "configs", "data", "model", "evals", "rl", "tasks", "flows", "uses", "store")
SDKS = {"openai", "mistralai"}
OF_VENDORS = {"configs/vendors.py", "data/endpoints/openai_client.py", "data/endpoints/mistral_client.py"}
OF_VENDORS.add("rl/checker.py")  # the program itself


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_module_names_a_vendor_or_imports_its_sdk(package):
    paths = {str(path.relative_to(ROOT)): path for path in (ROOT / package).rglob("*.py")}
    elsewhere = []
    for name in paths.keys() - OF_VENDORS:
        for node in ast.walk(ast.parse(paths[name].read_text(encoding="utf-8"))):
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


def test_one_more_entry_is_one_more_vendor(monkeypatch, pool_for):
    """With an address and a form of its own, for chat completions and for embeddings."""
    with FakeOpenAI() as server, FakeEmbeddings() as embeddings:
        monkeypatch.setitem(VENDORS, "acme", Vendor(url=server.url, needs_key=True, seed_field="acme_seed"))
        monkeypatch.setitem(VENDORS, "acme vectors", Vendor(url=embeddings.url))
        monkeypatch.setenv("ACME_KEY", "sk-acme-0123456789")
        with pytest.raises(ValueError, match="kind 'acme' has no batch interface"):
            EndpointConfig(kind="acme", model="fake", mode="batch")
        pool = pool_for(fake=EndpointConfig(kind="acme", model="fake", key_variable="ACME_KEY"))
        pool.check()
        (reply,) = pool.ask([ChatRequest("fake", ({"role": "user", "content": "hello"},), 20, seed=7)])
        assert isinstance(reply, ChatReply)
        assert server.bodies[0]["acme_seed"] == 7
        encoder = encoder_for(EmbeddingConfig(kind="acme vectors", model="m", width=embeddings.width))
        assert encoder.encode(["one"]).shape == (1, embeddings.width)
