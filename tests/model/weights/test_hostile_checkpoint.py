"""Malicious checkpoints: none is executed, none fills the memory, each is refused in one line naming the file."""

import json
import os
import pickle
import resource
import shutil
import struct
import zipfile

import jax
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.model.nautile import shapes
from nautile.model.weights.author_import import load_author_weights
from nautile.model.weights.author_shapes import author_shapes
from nautile.model.weights.files import load_weights, save_weights
from tests.model.conftest import tiny_config

TOKENIZER = TokenizerConfig(ranks=256)
SHAPE = tiny_config(blocks=1, pattern="SA", context=16)


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_weights(folder, jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes(SHAPE)), SHAPE, TOKENIZER)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    """A run that diverged publishes nothing, and the message counts what is wrong."""
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes(SHAPE))
    params["embedding"][3, :2] = np.nan, np.inf
    names = f"not written: 2 of the {params['embedding'].size} numbers of `embedding` are not finite, and 1 of"
    refused(save_weights, tmp_path / "new", params, SHAPE, TOKENIZER, names=names)
    assert not (tmp_path / "new").exists()


def refused(call, *arguments, names):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert str(names) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024, "KiB more than before"
    return str(caught.value)


def change_header(path, change):
    """Rewrite the file with a changed header and the same data."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + size])
    change(entries)
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])


def false_entry(**fields):
    def change(entries):
        name = sorted(name for name in entries if name != "__metadata__")[0]
        entries[name] |= fields

    return change


@pytest.mark.parametrize(
    "change",
    [
        false_entry(shape=[10**9, 10**9]),
        false_entry(shape=[2**63, 2**63]),
        false_entry(shape=[-1]),
        false_entry(data_offsets=[0, 10**12]),
        false_entry(data_offsets=[10**12, 0]),
        false_entry(dtype="F64"),
        false_entry(dtype="OBJECT"),
        lambda entries: entries.update(
            {f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(999)}
        ),
    ],
)
def test_a_header_with_false_entries(folder, change):
    change_header(folder / "weights.safetensors", change)
    refused(load_weights, folder, names=folder / "weights.safetensors")


@pytest.mark.parametrize("size", [0, 7, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_any_length(folder, size):
    path = folder / "weights.safetensors"
    path.write_bytes(struct.pack("<Q", size) + b"{" * 100)
    refused(load_weights, folder, names=path)


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json"])
def test_a_pickle_under_another_name_is_not_executed(folder, tmp_path, name):
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    refused(load_weights, folder, names=folder / name)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"[" * 10_000_000, b'{"model":' * 1_000_000, b"\xff" * 100, b"null", b"[]", b"7"])
def test_a_description_that_is_none(folder, content):
    (folder / "config.json").write_bytes(content)
    refused(load_weights, folder, names=folder / "config.json")


def test_a_description_of_ten_gigabytes_or_without_an_end(folder):
    path = folder / "config.json"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)
    refused(load_weights, folder, names=path)
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(load_weights, folder, names=path)


@pytest.mark.parametrize(
    "claim",
    [
        {"vocabulary": 10**12}, {"context": 10**12}, {"context": 2**24},
        {"width": 2**40}, {"blocks": 10**9}, {"feed_forward": 10**15},
        {"pattern": "S" * 10**6},  # each is traced apart, so that their number costs time and not memory alone
    ],
)  # fmt: skip
def test_a_model_too_large_for_any_memory(folder, claim):
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"model": table["model"] | claim}))
    refused(load_weights, folder, names=folder)


def author_archive(path, claims=None, content=None):
    """An .npz of the author's layout, with other headers than contents; zeros, which take no place."""
    actual = {
        name: shape for name, shape in author_shapes(SHAPE.model_copy(update={"vocabulary": TOKENIZER.vocabulary}))
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in (actual | (claims or {})).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                described = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, described)
                member.write(bytes(4 * int(np.prod(actual.get(name, (1,))))))
        for name, data in (content or {}).items():
            archive.writestr(name, data)
    return path


def test_an_archive_is_judged_by_its_headers_before_it_is_unpacked(tmp_path):
    good = author_archive(tmp_path / "good.npz")
    load_author_weights(good, SHAPE, TOKENIZER, context=16)
    for claims in (
        {"embedding.weight": (10**11, SHAPE.width)},
        {"blocks.0.norm.scale": (10**12,)},
        {"more": (10**12,)},
    ):
        path = author_archive(tmp_path / "bad.npz", claims)
        refused(load_author_weights, path, SHAPE, TOKENIZER, names=path)


@pytest.mark.parametrize("header", [b"(" * 9000, b"-" * 8999 + b"1"])
def test_a_header_that_pythons_parser_gives_up_on_is_refused(tmp_path, header):
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    path = author_archive(tmp_path / "bad.npz", content={"a.npy": array})
    refused(load_author_weights, path, SHAPE, TOKENIZER, names=path)


def test_names_in_an_archive_are_names_only(tmp_path):
    path = author_archive(tmp_path / "bad.npz", content={"../../escaped.npy": b"\x93NUMPY\x01\x00", "x": b"no array"})
    refused(load_author_weights, path, SHAPE, TOKENIZER, names=path)
    assert sorted(tmp_path.iterdir()) == [path]
    assert not (tmp_path.parent / "escaped.npy").exists()


@pytest.mark.parametrize("name", ["theirs.npz", "theirs.safetensors", "theirs.bin"])
def test_a_pickle_is_no_import(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"embedding.weight": Bomb(tmp_path / "executed")}))
    refused(load_author_weights, path, SHAPE, TOKENIZER, names=path)
    np.save(tmp_path / "array.npy", np.array([Bomb(tmp_path / "executed")], dtype=object), allow_pickle=True)
    (tmp_path / "array.npy").rename(path)
    refused(load_author_weights, path, SHAPE, TOKENIZER, names=path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "header",
    [
        {"descr": "<U7000000", "fortran_order": False, "shape": (SHAPE.width,)},
        {"descr": "|V27000000", "fortran_order": False, "shape": (SHAPE.width,)},
        {"descr": [("a", "<f4"), ("b", "<f4")], "fortran_order": False, "shape": (SHAPE.width,)},
        None,  # a header that says it has 4 GiB, of which zeros follow
    ],
)
def test_an_array_of_anything_but_numbers_is_judged_by_its_header(tmp_path, header):
    path = author_archive(tmp_path / "wide.npz")
    renamed = tmp_path / "bad.npz"
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(renamed, "w", zipfile.ZIP_DEFLATED) as bad:
        for name in good.namelist():
            with bad.open(name, "w", force_zip64=True) as member:
                if name != "blocks.0.norm.scale.npy":
                    member.write(good.read(name))
                elif header:
                    np.lib.format.write_array_header_2_0(member, header)
                else:
                    member.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1))
                    for _ in range(64):
                        member.write(bytes(2**20))
    refused(load_author_weights, renamed, SHAPE, TOKENIZER, names=renamed)


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json"])
def test_a_fifo_in_a_checkpoint_is_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(load_weights, folder, names=folder / name)


@pytest.mark.parametrize("name", ["theirs.npz", "theirs.safetensors"])
@pytest.mark.parametrize("target", [None, "/dev/zero"])
def test_a_fifo_or_a_device_is_not_imported(tmp_path, name, target):
    path = tmp_path / name
    os.mkfifo(path) if target is None else path.symlink_to(target)
    refused(load_author_weights, path, SHAPE, TOKENIZER, names=path)
