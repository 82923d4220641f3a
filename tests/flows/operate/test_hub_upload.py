"""Uploads to a Hub on loopback through the real client: what is sent, what is not, rights, outages, interruptions."""

import hashlib
import logging

import pytest
from huggingface_hub import constants

from nautile.common.errors import ConfigError, Retryable
from nautile.flows.operate.publish import HubUploader, check_repository
from tests.support.servers.upload_hub import UploadHub

TOKEN, READER = "hf_writerwriterwriter", "hf_readerreaderreader"
CARD = "---\nlicense: mit\n---\n# A model\n"


@pytest.fixture
def hub(monkeypatch):
    # Large files go by LFS: the other protocol's client is a program of its own, which speaks to other servers.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with UploadHub({TOKEN: {"me"}, READER: set()}) as server:
        yield server


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def uploader(hub, pauses):
    return HubUploader(TOKEN, hub.url, pauses.append)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "onnx").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    (folder / "weights.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "onnx" / "graph.onnx").write_bytes(bytes(1000))
    return folder


def publish(uploader, folder, private=True):
    plan = uploader.plan(folder, "me/small", "model", private)
    return plan, uploader.upload(plan, "a checkpoint") if plan.to_send else None


def test_a_first_upload_creates_a_private_repository_with_every_file(hub, uploader, folder):
    plan, address = publish(uploader, folder)
    assert [(file.path, file.state) for file in plan.files] == [
        ("README.md", "new"), ("onnx/graph.onnx", "new"), ("weights.safetensors", "new"),
    ]  # fmt: skip
    assert plan.head is None
    repository = hub.repositories["model", "me/small"]
    assert repository.private
    assert repository.summaries == ["initial commit", "a checkpoint"]
    assert address == f"{hub.url}/me/small/commit/{repository.commits[-1]}"
    for file in plan.files:
        assert repository.files[file.path] == (folder / file.path).read_bytes()


def test_the_same_bytes_are_not_sent_again(hub, uploader, folder):
    publish(uploader, folder)
    hub.calls.clear()
    plan, address = publish(uploader, folder)
    assert (plan.to_send, address) == ((), None)
    assert set(hub.calls) == {"info", "tree"}


def test_only_what_changed_is_sent_and_other_files_stay(hub, uploader, folder):
    publish(uploader, folder)
    repository = hub.repositories["model", "me/small"]
    repository.files["LICENSE"] = b"theirs"
    (folder / "README.md").write_text(CARD + "more\n")
    sent = dict(hub.received)
    plan, _ = publish(uploader, folder)
    assert [file.path for file in plan.to_send] == ["README.md"]
    assert plan.others == ("LICENSE",)
    assert repository.files["LICENSE"] == b"theirs"
    assert repository.files["README.md"].endswith(b"more\n")
    assert dict(hub.received) == sent


def test_a_change_of_equal_size_is_a_change(hub, uploader, folder):
    publish(uploader, folder)
    (folder / "README.md").write_text(CARD.replace("model", "Model"))
    (folder / "onnx" / "graph.onnx").write_bytes(bytes(999) + b"\1")
    plan, _ = publish(uploader, folder)
    assert [file.path for file in plan.to_send] == ["README.md", "onnx/graph.onnx"]


def test_a_dataset_has_a_repository_of_its_own_kind(hub, uploader, folder):
    plan = uploader.plan(folder, "me/texts", "dataset", False)
    uploader.upload(plan, "documents")
    assert not hub.repositories["dataset", "me/texts"].private
    assert not uploader.plan(folder, "me/texts", "dataset", True).private, "it stays as it is"
    assert uploader.plan(folder, "me/texts", "model", True).head is None


@pytest.mark.parametrize(
    ("token", "repository", "message"),
    [
        ("hf_unknown", "me/small", "refused the token: set HF_TOKEN"),
        (READER, "me/small", "no write access there"),
        (TOKEN, "them/small", "no write access there"),
    ],
)
def test_a_token_without_rights_is_one_message_and_nothing_is_made(hub, folder, caplog, token, repository, message):
    uploader = HubUploader(token, hub.url)

    def publish():
        uploader.user()
        uploader.upload(uploader.plan(folder, repository, "model", True), "a checkpoint")

    with pytest.raises(ConfigError, match=message) as raised:
        publish()
    assert token not in str(raised.value) + caplog.text
    assert "\n" not in str(raised.value)
    assert not hub.repositories


def test_a_right_to_read_is_not_one_to_write(hub, uploader, folder):
    publish(uploader, folder, private=False)
    (folder / "README.md").write_text(CARD + "more\n")
    reader = HubUploader(READER, hub.url)
    with pytest.raises(ConfigError, match="no write access there"):
        reader.upload(reader.plan(folder, "me/small", "model", True), "a checkpoint")
    assert hub.repositories["model", "me/small"].files["README.md"].decode() == CARD


@pytest.mark.parametrize("call", ["whoami", "info", "create", "validate", "commit"])
def test_an_outage_is_waited_for(hub, uploader, folder, pauses, call, caplog):
    hub.faults[call] = [503, "page" if call in ("info", "validate") else "hang up"]
    uploader.user()
    publish(uploader, folder)
    assert len(pauses) == 2
    assert hub.count("whoami") == (3 if call == "whoami" else 1)
    assert set(hub.received.values()) == {1}
    assert uploader.plan(folder, "me/small", "model", True).to_send == ()
    assert TOKEN not in caplog.text


def test_a_lasting_outage_ends_with_a_message_without_the_token(hub, uploader, folder, pauses, caplog):
    caplog.set_level(logging.DEBUG)
    hub.faults["create"] = [500] * 9
    with pytest.raises(Retryable, match="the Hub answered with status 500") as raised:
        publish(uploader, folder)
    assert len(pauses) == 3
    assert TOKEN not in str(raised.value) + caplog.text
    assert "(refused Bearer (the token))" in str(raised.value)


def test_large_files_that_arrived_are_not_sent_again_after_an_interruption(hub, uploader, folder):
    plan = uploader.plan(folder, "me/small", "model", True)
    hub.faults["commit"] = [400]
    with pytest.raises(ConfigError, match="answered with status 400"):
        uploader.upload(plan, "a checkpoint")
    repository = hub.repositories["model", "me/small"]
    assert list(repository.files) == [".gitattributes"], "nothing is half there"
    plan, _ = publish(uploader, folder)
    assert len(repository.files) == 4
    digest = hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    assert hub.received[digest] == 1


def test_a_commit_of_someone_else_meanwhile_is_not_written_over(hub, uploader, folder):
    publish(uploader, folder)
    (folder / "README.md").write_text(CARD + "more\n")
    plan = uploader.plan(folder, "me/small", "model", True)
    hub.repositories["model", "me/small"].commit("theirs")
    with pytest.raises(ConfigError, match="the repository has changed in the meantime"):
        uploader.upload(plan, "a checkpoint")


def test_a_card_that_the_hub_refuses_is_reported_before_anything_is_sent(hub, uploader, folder):
    (folder / "README.md").write_text("---\nlicense: my own!\n---\n")
    with pytest.raises(ConfigError, match="license: not an identifier"):
        publish(uploader, folder)
    assert not hub.received


def test_a_client_that_may_not_ask_anybody_says_which_variable_forbids_it(uploader, hub, monkeypatch, pauses):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids any request to the Hub: unset it"):
        uploader.user()
    assert (pauses, hub.calls) == ([], [])


@pytest.mark.parametrize("name", ["small", "a/b/c", "me/sm all", "me/", "/small", "me/..", "me/a--b", "", "me/\x1b[1m"])
def test_what_is_no_repository_is_refused(name):
    with pytest.raises(ConfigError, match="is not a repository of the Hub, OWNER/NAME") as raised:
        check_repository(name)
    assert "\x1b" not in str(raised.value)
