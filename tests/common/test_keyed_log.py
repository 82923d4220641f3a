"""The append-only log: what was written is found, whatever was torn, killed or full in between."""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common import keyed_log
from nautile.common.keyed_log import KeyedLog

SIZE = 24  # of a record of fixed size: 16 bytes of digest, 8 of content


@pytest.fixture(autouse=True, scope="module")
def _small_merges():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed_log, "SMALLEST_MERGE", 5)
        yield


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


def fixed(number: int, content: int) -> bytes:
    return digest(number) + content.to_bytes(8, "little")


def line(number: int, content: int) -> bytes:
    return b"%s %s.\n" % (digest(number).hex().encode(), b"x" * content)


def line_digest(record: bytes) -> bytes:
    if not record.rstrip(b"\n").endswith(b"."):
        raise ValueError("a torn line")
    return bytes.fromhex(record.partition(b" ")[0].decode())


def new_log(lines: bool) -> KeyedLog:
    return KeyedLog(line_digest) if lines else KeyedLog(lambda record: record[:16], SIZE)


def append(log: KeyedLog, records: dict[int, bytes]) -> None:
    positions = log.write(list(records.values()))
    for number, position in zip(records, positions, strict=True):
        log.add(digest(number), position)


GROUPS = st.lists(st.dictionaries(st.integers(0, 30), st.integers(0, 90), max_size=5), max_size=12)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [True, False])
@given(groups=GROUPS, cuts=st.lists(st.integers(0, 80), min_size=12, max_size=12))
def test_the_latest_record_of_a_digest_is_found_after_any_cuts_and_reopenings(lines, groups, cuts):
    """Each group is written by a process of its own, which finds the end of the file cut within the last record."""
    make = line if lines else fixed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        written: list[tuple[int, bytes]] = []  # the whole records in the file, in order
        for group, cut in zip(groups, cuts, strict=False):
            # Tear the last record, but never only its newline, without which a line is still whole.
            content = path.read_bytes() if written else b""
            if written and content.endswith(written[-1][1]) and lines < cut < len(written[-1][1]):
                os.truncate(path, len(content) - cut)
                del written[-1]
            log = new_log(lines)
            log.open(path)
            records = {number: make(number, content) for number, content in group.items()}
            append(log, records)
            written += records.items()
            expected = {number: record.rstrip(b"\n") if lines else record for number, record in written}
            again = new_log(lines)
            again.load(path)
            for reader in (log, again):
                assert len(reader) == len(expected)
                assert {number: reader.get(digest(number)) for number in expected} == expected
                assert reader.get(digest(99)) is None
                reader.close()


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 7, 23])
def test_a_disk_that_fills_up_within_a_record_damages_no_other(tmp_path, monkeypatch, lines, kept):
    make, write = line if lines else fixed, os.write
    path = tmp_path / "log"

    def fill_up(descriptor, content):
        write(descriptor, content[:kept])
        raise OSError(28, "No space left on device")

    log = new_log(lines)
    log.open(path)
    append(log, {1: make(1, 10)})
    with monkeypatch.context() as full:
        full.setattr(os, "write", fill_up)
        with pytest.raises(OSError, match="No space"):
            append(log, {2: make(2, 10)})
    append(log, {3: make(3, 10)})
    again = new_log(lines)
    again.load(path)
    for reader in (log, again):
        assert reader.get(digest(1)) == make(1, 10).rstrip(b"\n")
        assert reader.get(digest(3)) == make(3, 10).rstrip(b"\n")
        assert reader.get(digest(2)) is None


def test_a_line_that_lacks_only_its_newline_is_whole(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(line(1, 5) + line(2, 5)[:-1])
    log = new_log(True)
    log.open(path)
    assert log.get(digest(2)) == line(2, 5)[:-1]
    append(log, {3: line(3, 5)})
    assert log.get(digest(2)) == line(2, 5)[:-1]
    assert path.read_bytes() == line(1, 5) + line(2, 5) + line(3, 5)


def test_damaged_lines_are_skipped(tmp_path, caplog):
    path = tmp_path / "log"
    path.write_bytes(b"\x00\x00\n\n" + line(1, 5) + b"zz zz.\n")
    log = new_log(True)
    log.open(path)
    assert len(log) == 1
    assert log.get(digest(1)) is not None
    assert caplog.text.count("damaged record") == 3


def test_several_files_are_read_and_one_of_its_own_is_written(tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}").write_bytes(fixed(number, 1) + fixed(0, number) + b"torn")
    log = new_log(False)
    log.load(tmp_path / "1")
    log.load(tmp_path / "2")
    assert not log.is_open
    log.open(tmp_path / "own", exclusive=True)
    append(log, {3: fixed(3, 1)})
    assert [log.get(digest(number)) for number in (1, 2, 3)] == [fixed(number, 1) for number in (1, 2, 3)]
    assert log.get(digest(0)) == fixed(0, 2), "the later file counts"
    assert (tmp_path / "1").stat().st_size == 52, "another's file is not changed"
    log.close()
    with pytest.raises(FileExistsError):
        new_log(False).open(tmp_path / "own", exclusive=True)


def test_a_file_that_was_cut_under_its_reader_is_an_error(tmp_path):
    path = tmp_path / "log"
    log = new_log(True)
    log.open(path)
    append(log, {1: line(1, 5)})
    os.truncate(path, 0)
    with pytest.raises(OSError, match="no longer exists"):
        log.get(digest(1))


def test_a_followed_file_that_is_replaced_by_a_longer_one_is_read_to_its_end(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(line(1, 5))
    log = new_log(True)
    log.follow(path)
    assert log.get(digest(1)) == line(1, 5)[:-1]
    # As a store's mirror fetches it again, with what its writer has appended since.
    (tmp_path / "new").write_bytes(line(1, 5) + line(2, 9))
    (tmp_path / "new").replace(path)
    log.follow(path)
    assert [log.get(digest(1)), log.get(digest(2))] == [line(1, 5)[:-1], line(2, 9)[:-1]]
    log.close()


def test_a_killed_writer_has_on_disk_what_it_acknowledged(tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.common.test_keyed_log import append, fixed, new_log\n"
        "log = new_log(False)\n"
        "log.open(Path(sys.argv[1]))\n"
        "for n in range(10**9):\n"
        "    append(log, {n: fixed(n, n)})\n"
        "    sys.stdout.write(f'{n}\\n'); sys.stdout.flush()\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as process:
        acknowledged = [int(process.stdout.readline()) for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(number) for number in process.stdout.read().split("\n")[:-1]]
    log = new_log(False)
    log.open(tmp_path / "log")
    assert all(log.get(digest(number)) == fixed(number, number) for number in acknowledged)
    append(log, {-1: fixed(-1 % 7, 5)})
    assert len(log) >= len(acknowledged) + 1
