"""`nautile.load("OWNER/NAME")`, through the real client against a Hub on loopback: what is fetched, what is refused."""

import shutil

import pytest

import nautile
from nautile.flows.named import checkpoint_id
from nautile.model.exports.formats import FORMATS
from nautile.store.artifacts import Store
from tests.flows.cli.test_chat import checkpoint  # noqa: F401 - a fixture
from tests.model.exports.onnx.conftest import exports, weights  # noqa: F401 - fixtures
from tests.support.servers.fake_hub import ACCEPTED, FakeHub

COMMIT = "c" * 40
WARM = {"max_tokens": 8, "temperature": 1.0, "seed": 3}


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Serve a folder as lab/small; its cache and store are new. `.stop()` takes the Hub away."""
    hubs = []

    def call(folder, **more):
        hub = FakeHub(folder, "lab/small", COMMIT, kind="models", **more)
        hubs.append(hub.__enter__())
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        return hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield call
    for hub in hubs:
        hub.__exit__(None, None, None)


@pytest.fixture
def published(checkpoint, tmp_path):  # noqa: F811
    FORMATS["nautile"](checkpoint, tmp_path / "published")
    (tmp_path / "published" / "modeling.py").write_text("raise SystemExit('executed')")
    return tmp_path / "published"


@pytest.mark.slow
def test_a_published_model_is_loaded_by_its_name_and_kept(publish, published, checkpoint, capfd):  # noqa: F811
    hub = publish(published)
    capfd.readouterr()
    model = nautile.load("lab/small")
    assert model.generate("2 + 2", **WARM) == nautile.load(checkpoint).generate("2 + 2", **WARM)
    assert {"config.json", "weights.safetensors"} <= set(hub.served)
    assert {"README.md", "modeling.py"}.isdisjoint(hub.served)
    assert capfd.readouterr() == ("", "")
    served = hub.served.total()
    assert nautile.load(f"lab/small@{COMMIT}").name == model.name
    assert hub.served.total() == served
    store = Store(model.folder.parents[4] / "store")
    assert checkpoint_id(store, "lab/small").startswith("checkpoint/")


def test_what_is_in_the_cache_is_used_without_the_hub(publish, published, monkeypatch):
    publish(published)
    name = nautile.load("lab/small").name
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert nautile.load("lab/small").name == name
    with pytest.raises(nautile.Retryable, match="lab/other of the Hub: the Hub did not answer"):
        nautile.load("lab/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert nautile.load("lab/small").name == name
    with pytest.raises(nautile.ConfigError, match="not in the cache, and HF_HUB_OFFLINE"):
        nautile.load("lab/other")


def test_what_cannot_be_loaded_is_one_error_with_what_helps(publish, published, monkeypatch):
    hub = publish(published, gated=True)
    for name, words in (
        ("lab/other", r"no such repository.*HF_TOKEN; nor is it a folder here, or an artifact of"),
        ("lab/small@v9", "lab/small@v9 of the Hub: .*check the revision"),
        ("lab/small", "is gated: accept its terms on the Hub and set HF_TOKEN"),
        ("checkpoints/12ab", "no artifact 'checkpoints/12ab'"),
    ):
        with pytest.raises(nautile.ConfigError, match=words):
            nautile.load(name)
    monkeypatch.setenv("HF_TOKEN", ACCEPTED)
    assert nautile.load("lab/small").runtime == "jax"
    (published / "weights.safetensors").rename(published / "model.safetensors")
    hub.revision = "d" * 40
    with pytest.raises(nautile.ConfigError, match="hf download lab/small --local-dir small` and `nautile import small"):
        nautile.load("lab/small")


@pytest.mark.slow
def test_an_export_for_onnxruntime_is_loaded_and_its_digests_checked(publish, exports, tmp_path):  # noqa: F811
    folder = shutil.copytree(exports[32], tmp_path / "export")
    hub = publish(folder)
    assert nautile.load("lab/small").runtime == "onnx"
    (folder / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[:-4] + b"abcd")
    hub.revision = "d" * 40
    with pytest.raises(nautile.ConfigError, match=r"weights\.bin"):
        nautile.load("lab/small")
