from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import orjson
import pytest
import xxhash

from headrace.errors import Conflict, Unavailable
from headrace_writer.destination import Destination

PLACE = PurePosixPath("rows/000000/a.bin")

HOLDER = """
import sys
from pathlib import Path
from headrace_writer.destination import Destination
held = Destination(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""


def put(content: bytes, file: io.RawIOBase) -> None:
    file.write(content)


@contextmanager
def other_writer(folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_published_file_is_whole_and_known_by_size_and_checksum(tmp_path: Path) -> None:
    destination = Destination(tmp_path / "made" / "by us", "w1")
    content = os.urandom(20_000_001)
    published = destination.publish(PLACE, lambda file: (file.write(content[:5]), file.write(memoryview(content)[5:])))
    assert published is not None
    assert (destination.folder / PLACE).read_bytes() == content
    assert (published.size, published.checksum) == (len(content), "xxh3:" + xxhash.xxh3_64_hexdigest(content))
    assert [path.name for path in (destination.folder / ".tmp" / "w1").iterdir()] == ["lock"]
    destination.close()
    assert not (destination.folder / ".tmp" / "w1").exists()


def test_a_file_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    first, second = Destination(tmp_path, "w1"), Destination(tmp_path, "w2")
    assert first.publish(PLACE, lambda file: file.write(b"first")) is not None
    assert second.publish(PLACE, lambda file: file.write(b"second")) is None
    assert (tmp_path / PLACE).read_bytes() == b"first"
    assert [path.name for path in (tmp_path / ".tmp" / "w2").iterdir()] == ["lock"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    destination = Destination(tmp_path, "w1")

    def fail(file: object) -> None:
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        destination.publish(PLACE, fail)
    assert not (tmp_path / PLACE).exists()
    assert [path.name for path in (tmp_path / ".tmp" / "w1").iterdir()] == ["lock"]


def test_a_place_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="file"):
        Destination(tmp_path / "file", "w1")


def test_the_scratch_of_a_dead_writer_is_removed_and_of_a_living_one_kept(tmp_path: Path) -> None:
    with other_writer(tmp_path, "dead") as dead, other_writer(tmp_path, "living"):
        for name in ("dead", "living"):
            (tmp_path / ".tmp" / name / "1-row").write_bytes(b"half a row")
        dead.kill()
        dead.wait()
        Destination(tmp_path, "new")
        assert sorted(path.name for path in (tmp_path / ".tmp").iterdir()) == ["living", "lock", "new"]
        assert (tmp_path / ".tmp" / "living" / "1-row").exists()


def test_two_living_writers_cannot_have_one_name(tmp_path: Path) -> None:
    with other_writer(tmp_path, "w1"), pytest.raises(Conflict, match="w1"):
        Destination(tmp_path, "w1")


def test_a_quarantined_file_is_kept_with_a_note(tmp_path: Path) -> None:
    destination = Destination(tmp_path, "w1")
    for content in (b"bad", b"worse"):
        destination.publish(PLACE, partial(put, content))
        destination.quarantine(PLACE, (tmp_path / PLACE).lstat(), {"problem": "wrong"})
        assert not (tmp_path / PLACE).exists()
    kept = sorted((tmp_path / ".quarantine").glob("*.bin.bad"))
    assert [path.read_bytes() for path in kept] == [b"bad", b"worse"]
    note = orjson.loads(kept[0].with_suffix(".json").read_bytes())
    assert note == {"problem": "wrong", "path": str(PLACE)}


def test_only_the_file_that_was_found_wrong_is_quarantined(tmp_path: Path) -> None:
    destination = Destination(tmp_path, "w1")
    destination.publish(PLACE, lambda file: file.write(b"bad"))
    with (tmp_path / PLACE).open("rb"):  # held open, so that its inode is not given to the next file
        bad = (tmp_path / PLACE).lstat()
        destination.quarantine(PLACE, bad, {})
        destination.quarantine(PLACE, bad, {})
        destination.publish(PLACE, lambda file: file.write(b"good"))
        destination.quarantine(PLACE, bad, {})
    assert (tmp_path / PLACE).read_bytes() == b"good"
    assert len(list((tmp_path / ".quarantine").glob("*.bin.bad"))) == 1


def test_a_folder_that_was_removed_is_made_again_after_one_error(tmp_path: Path) -> None:
    destination = Destination(tmp_path, "w1")
    assert destination.publish(PLACE, lambda file: file.write(b"first")) is not None
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(Unavailable):
        destination.publish(PLACE, lambda file: file.write(b"second"))
    assert destination.publish(PLACE, lambda file: file.write(b"third")) is not None
    assert (tmp_path / PLACE).read_bytes() == b"third"
