from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from headrace.dumpfolder import read_card
from headrace.dumps import PROBLEM_FILE, EngineProblem, encode_json
from headrace.errors import UsageError
from headrace_capture.folder import Folder
from tests.support.capture import HIDDEN, assert_published, forward_of, prompt, start_capture

BOOT, OTHER = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


def raiser(error: type[Exception]) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error("provoked")

    return fail


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_folder_is_made_with_its_mode_and_an_existing_one_is_mended(tmp_path: Path) -> None:
    fresh, existing = tmp_path / "deep" / "fresh", tmp_path / "existing"
    existing.mkdir(mode=0o755)
    for path in (fresh, existing):
        Folder(path, BOOT).close()
        assert path.stat().st_mode & 0o7777 == 0o2770
        assert path.stat().st_gid == os.getgid()


def test_a_given_group_is_kept_and_inherited(tmp_path: Path) -> None:
    path = tmp_path / "dumps"
    path.mkdir()
    try:
        os.chown(path, -1, 12345)
    except PermissionError:
        pytest.skip("giving a folder to a group needs root")
    folder = Folder(path, BOOT)
    folder.put("x", b"x", replace=False)
    assert (path.stat().st_gid, (path / "x").stat().st_gid) == (12345, 12345)
    folder.close()


def test_what_a_dead_boot_left_is_swept_and_the_rest_stays(tmp_path: Path) -> None:
    swept = [f".{OTHER}.hr-x.part", f".{OTHER}.lock", f".{OTHER}.engine.json.tmp", f"final_norm.{OTHER}.safetensors"]
    swept += [f"stats.{OTHER}.json", "hr-old.lost.json", "engine.json", "engine.problem.json"]
    kept = [".site", ".watcher.lock", "hr-x.safetensors", "hr-new.lost.json", "README"]
    for name in [*swept, *kept]:
        (tmp_path / name).write_text("{}")
    os.utime(tmp_path / "hr-old.lost.json", (0, 0))
    folder = Folder(tmp_path, BOOT)
    assert names(tmp_path) == {*kept, f".{BOOT}.lock"}
    folder.close()
    assert names(tmp_path) == set(kept)


def test_an_engine_that_lives_beside_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    first = start_capture(folder, norm_weight=torch.ones(HIDDEN))
    one = prompt(40)
    first.forward(forward_of([(one, 0, 30)]))
    assert first.flush(30)
    before = names(folder)
    second = Folder(folder, BOOT)
    assert names(folder) == before | {f".{BOOT}.lock"}
    second.close()
    first.forward(forward_of([(one, 30, 40)]))
    assert first.flush(30)
    assert_published(folder, one)
    first.close(10)


def test_the_problem_of_an_engine_is_swept_when_that_engine_is_dead(tmp_path: Path) -> None:
    first = Folder(tmp_path, OTHER)
    first.put(PROBLEM_FILE, encode_json(EngineProblem(boot=OTHER, problem="no seam")), replace=True)
    Folder(tmp_path, BOOT).close()
    assert PROBLEM_FILE in names(tmp_path)
    first.close()
    Folder(tmp_path, BOOT).close()
    assert names(tmp_path) == set()


def test_an_engine_that_was_killed_is_swept_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from tests.support.capture import *\n"
        "folder = Path(sys.argv[1]); capture = start_capture(folder, norm_weight=torch.ones(HIDDEN))\n"
        "capture.forward(forward_of([(prompt(10, ordinal=1), 0, 10), (prompt(99), 0, 50)])); capture.flush(30)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folder = tmp_path / "dumps"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, str(folder)], cwd=root, check=False, timeout=120)
    dead = read_card(folder / "engine.json").boot
    assert f".{dead}.{prompt(99).rid}.part" in names(folder)
    capture = start_capture(folder)
    assert not [name for name in names(folder) if dead in name]
    assert read_card(folder / "engine.json").boot == capture.boot
    assert_published(folder, prompt(10, ordinal=1))
    capture.close(10)


def test_a_small_file_is_published_whole_and_not_replaced_unless_asked(tmp_path: Path) -> None:
    folder = Folder(tmp_path, BOOT)
    assert folder.put("x", b"one", replace=False)
    assert not folder.put("x", b"two", replace=False)
    assert (tmp_path / "x").read_bytes() == b"one"
    assert folder.put("x", b"three", replace=True)
    assert (tmp_path / "x").read_bytes() == b"three"
    assert names(tmp_path) == {"x", f".{BOOT}.lock"}
    folder.close()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError])
@pytest.mark.parametrize("removable", [True, False])
def test_a_small_file_that_could_not_be_written_is_written_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], removable: bool
) -> None:
    folder = Folder(tmp_path, BOOT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", raiser(error))
        if not removable:
            patch.setattr(os, "unlink", raiser(PermissionError))
        with pytest.raises(error):
            folder.put("x", b"one", replace=True)
    assert names(tmp_path) == {f".{BOOT}.lock"} | (set() if removable else {f".{BOOT}.x.tmp"})
    assert folder.put("x", b"one", replace=True)
    assert names(tmp_path) == {"x", f".{BOOT}.lock"}
    folder.close()


def test_what_could_not_be_removed_is_removed_when_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, BOOT)
    files = [folder.hidden(name) for name in ("a", "b", "c")]
    for name in files:
        (tmp_path / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", raiser(PermissionError))
        for name in files:
            folder.remove(name)
        folder.tidy()
    assert names(tmp_path) == {*files, f".{BOOT}.lock"}
    (tmp_path / files[1]).unlink()
    (tmp_path / files[1]).mkdir()  # which stays in the way, and in nobody's but its own
    folder.tidy()
    folder.tidy()
    assert names(tmp_path) == {files[1], f".{BOOT}.lock"}
    folder.close()


def test_a_dump_that_has_its_name_is_published_though_its_hidden_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, BOOT)
    hidden = folder.hidden("hr-x.part")
    (tmp_path / hidden).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", raiser(PermissionError))
        assert folder.publish(hidden, "hr-x")
    folder.close()
    assert names(tmp_path) == {"hr-x"}


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    folder = Folder(tmp_path / "dumps", BOOT)
    (tmp_path / "dumps" / f".{BOOT}.y").symlink_to(target)
    (tmp_path / "dumps" / "engine.json").symlink_to(target)
    with pytest.raises(FileExistsError):
        folder.create(f".{BOOT}.y")
    assert folder.put("engine.json", b"new", replace=True)
    assert target.read_text() == "precious" and not (tmp_path / "dumps" / "engine.json").is_symlink()
    folder.close()


def test_a_place_that_cannot_be_a_dump_folder_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "sticky" / "somebodys").mkdir(parents=True)
    (tmp_path / "sticky").chmod(0o1777)
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link", Path("/proc/no-such-folder")):
        with pytest.raises(UsageError, match="HEADRACE_DUMP_DIR"):
            start_capture(place)
    shared = [tmp_path / "sticky", Path("/tmp")]
    for place in shared:
        with pytest.raises(UsageError, match="a folder of its own"):
            start_capture(place)
    assert (tmp_path / "sticky").stat().st_mode & 0o7777 == 0o1777


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with pytest.raises(UsageError, match="Read-only file system"):
            start_capture(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_folder_cannot_be_started_in_and_says_so(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        tmp_path.chmod(0o2770)
        (tmp_path / "filler").write_bytes(bytes(64 << 10))
        with pytest.raises(UsageError, match="No space left"):
            start_capture(tmp_path)
        assert names(tmp_path) == {"filler"}
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_arguments_that_contradict_are_usage_errors(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    with pytest.raises(UsageError, match="float64"):
        start_capture(folder, dtype=torch.float64)
    with pytest.raises(UsageError, match="does not hold a row"):
        start_capture(folder, buffer_bytes=100)
    with pytest.raises(UsageError, match="final norm"):
        start_capture(folder, norm_weight=torch.ones(HIDDEN + 1))
    assert not folder.exists()
