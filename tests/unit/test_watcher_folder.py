from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.dumps import ENGINE_FILE, LOCK_FILE, PROBLEM_FILE, SITE_FILE
from headrace.errors import Conflict, UsageError
from headrace_watcher.folder import DumpFolder, identify, is_known
from tests.support.stores import make_sample
from tests.support.watched import lose, make_card, publish

SAMPLE = make_sample()


def test_a_missing_folder_is_made_for_a_shared_group(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "dumps"
    with DumpFolder.open(path) as folder:
        assert stat.S_IMODE(path.stat().st_mode) == 0o2770
        assert folder.scan().dumps == ()


def test_a_folder_keeps_its_name_and_a_new_one_gets_another(tmp_path: Path) -> None:
    path = tmp_path / "dumps"
    with DumpFolder.open(path) as folder:
        first = folder.site
    with DumpFolder.open(path) as folder:
        assert folder.site == first
    assert stat.S_IMODE((path / SITE_FILE).stat().st_mode) == 0o640
    shutil.rmtree(path)
    with DumpFolder.open(path) as folder:
        assert folder.site != first
        assert (path / SITE_FILE).read_text().strip() == folder.site


@pytest.mark.parametrize("text", ["", "x", "s12345", "../../etc", "s123456789\0"])
def test_a_name_that_is_none_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / SITE_FILE).write_text(text)
    with DumpFolder.open(tmp_path) as folder:
        assert len(folder.site) == 11


def test_a_name_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / SITE_FILE).symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="remove it"):
        DumpFolder.open(tmp_path)


def test_a_second_watcher_is_told_who_is_first(tmp_path: Path) -> None:
    with DumpFolder.open(tmp_path), pytest.raises(Conflict, match=f"{tmp_path} is watched by process {os.getpid()} "):
        DumpFolder.open(tmp_path)
    with DumpFolder.open(tmp_path):
        pass


def test_a_lock_without_a_number_is_held_all_the_same(tmp_path: Path) -> None:
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="another process"):
            DumpFolder.open(tmp_path)


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    with DumpFolder.open(tmp_path):
        code = "print('started', flush=True); input()"
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
        )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        with DumpFolder.open(tmp_path):
            pass
    finally:
        child.communicate(b"\n", timeout=20)


@pytest.mark.parametrize("place", ["/proc/headrace", "/dev/null/dumps"])
def test_a_folder_that_cannot_be_made_names_the_setting(place: str) -> None:
    with pytest.raises(UsageError, match="HEADRACE_DUMP_DIR"):
        DumpFolder.open(Path(place))


def test_a_file_in_the_folders_place_names_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "dumps"
    path.write_text("")
    with pytest.raises(UsageError, match="HEADRACE_DUMP_DIR"):
        DumpFolder.open(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_not_writable_names_the_setting(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="HEADRACE_DUMP_DIR"):
        DumpFolder.open(tmp_path)
    tmp_path.chmod(0o700)


def test_a_folder_that_is_replaced_is_not_watched_on(tmp_path: Path) -> None:
    path = tmp_path / "dumps"
    with DumpFolder.open(path) as folder:
        folder.check()
        shutil.rmtree(path)
        with pytest.raises(Conflict, match="is gone"):
            folder.check()
        with pytest.raises(Conflict, match="is gone"):
            folder.scan()
        with DumpFolder.open(path), pytest.raises(Conflict, match="made anew"):
            folder.check()


def test_only_our_regular_files_are_ours(tmp_path: Path) -> None:
    with DumpFolder.open(tmp_path / "dumps") as folder:
        path = folder.path
        dump = publish(path, SAMPLE.request(), SAMPLE.token_ids)
        notice = lose(path, SAMPLE.request(1), "evicted")
        (path / ENGINE_FILE).write_text("{}")
        (path / PROBLEM_FILE).write_text("{}")
        (path / "final_norm.abc.safetensors").write_bytes(b"")
        (path / "stats.abc.json").write_text("{}")
        (path / f".boot.{SAMPLE.request(2)}.safetensors").write_bytes(b"half")
        foreign = {
            "req_12.safetensors",
            "notes.txt",
            "stats.json",
            "hr-tale-7-nonce000-12-zzzz.safetensors",
            f"{SAMPLE.request(3)}.safetensors",
            f"{SAMPLE.request(4)}.safetensors",
            f"{SAMPLE.request(5)}.safetensors",
            f"{SAMPLE.request(6)}.lost.json",
            "folder",
            "line\nbreak",
            os.fsdecode(b"not-utf8-\xff"),
        }
        (path / f"{SAMPLE.request(3)}.safetensors").symlink_to(dump)
        (path / f"{SAMPLE.request(4)}.safetensors").mkdir()
        os.mkfifo(path / f"{SAMPLE.request(5)}.safetensors")
        (path / f"{SAMPLE.request(6)}.lost.json").symlink_to("/etc/passwd")
        (path / "folder").mkdir()
        for name in foreign:
            if not os.path.lexists(path / name):
                (path / name).write_bytes(b"x")
        listing = folder.scan()
        assert [entry.name for entry in listing.dumps] == [dump.name]
        assert [entry.name for entry in listing.notices] == [notice.name]
        assert set(listing.foreign) == foreign
        assert listing.card is not None


def test_the_card_is_seen_to_change(tmp_path: Path) -> None:
    with DumpFolder.open(tmp_path) as folder:
        assert folder.scan().card is None
        (tmp_path / ENGINE_FILE).write_text("{}")
        first = folder.scan().card
        assert folder.scan().card == first
        (tmp_path / ENGINE_FILE).write_text(make_card().boot)
        assert folder.scan().card != first


def test_a_problem_notice_is_seen_to_come_and_to_change(tmp_path: Path) -> None:
    with DumpFolder.open(tmp_path) as folder:
        assert folder.scan().problem is None
        (tmp_path / PROBLEM_FILE).write_text("{}")
        first = folder.scan().problem
        assert first is not None
        (tmp_path / PROBLEM_FILE).write_text("{} ")
        assert folder.scan().problem != first
        assert folder.scan().card is None


def test_every_byte_is_measured_once(tmp_path: Path) -> None:
    with DumpFolder.open(tmp_path) as folder:
        before = folder.scan().nbytes
        with (tmp_path / ".hidden").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
        assert folder.scan().nbytes >= before + (1 << 20)
        (tmp_path / "second-name").hardlink_to(tmp_path / ".hidden")
        assert folder.scan().nbytes < before + (2 << 20)
        with (tmp_path / ".sparse").open("wb") as file:
            file.truncate(8 << 20)
        assert folder.scan().nbytes >= before + (9 << 20)
        size, free = folder.capacity()
        assert size >= free > 0


def test_names_are_told_apart() -> None:
    request = SAMPLE.request()
    assert identify(f"{request}.safetensors") == (request, ".safetensors")
    assert identify(f"{request}.lost.json") == (request, ".lost.json")
    for name in (f"{request}", f"{request}.safetensors.tmp", f".{request}.safetensors", f"{request}x.safetensors", ""):
        assert identify(name) is None
    assert is_known("engine.json")
    assert is_known(".anything")
    assert not is_known("final_norm")


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    with DumpFolder.open(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [SITE_FILE, LOCK_FILE]


def test_a_lock_that_is_no_file_names_the_setting(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / LOCK_FILE))
        with pytest.raises(UsageError, match="HEADRACE_DUMP_DIR"):
            DumpFolder.open(tmp_path)
