"""Bad input gives one line that names the thing, an exit code, and nothing half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.bus.values import Site
from tests.support.bus_values import make_site
from tests.support.commands import assert_one_line, headrace
from tests.support.filesystems import read_only_mount
from tests.support.pipeline import write_run_file, write_samples
from tests.support.server import ValkeyServer, free_port

pytestmark = pytest.mark.pipeline


@pytest.fixture
def site() -> Site:
    """A registration of an engine that serves the tiny model."""
    return make_site(
        model="tiny", boundaries=(2, 4, 5), hidden_size=64, dtype="F32", max_tokens=10_000, dump_cap_bytes=1 << 30
    )


@pytest.fixture
def run_file(tmp_path: Path, tiny: Path) -> Path:
    return write_run_file(tmp_path, write_samples(tmp_path / "data.jsonl", 3), tiny)


def submit(run_file: Path, url: str, *more: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return headrace("submit", run_file, *more, HEADRACE_REDIS_URL=url, **environ)


def test_a_run_file_that_is_missing(tmp_path: Path, redis_url: str, bus: Bus) -> None:
    assert_one_line(submit(tmp_path / "none.toml", redis_url), 2, "none.toml")


def test_a_data_file_that_is_missing(tmp_path: Path, redis_url: str, bus: Bus, run_file: Path) -> None:
    (tmp_path / "data.jsonl").unlink()
    assert_one_line(submit(run_file, redis_url), 2, "data.jsonl")
    assert not (tmp_path / "dataset").exists()


def test_a_line_that_is_not_json_is_named_by_its_number(
    tmp_path: Path, redis_url: str, bus: Bus, run_file: Path
) -> None:
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"input_ids": [1, 2\n')
    assert_one_line(submit(run_file, redis_url), 2, "data.jsonl", "4")
    assert not list((tmp_path / "dataset").glob("*"))
    assert bus.runs.names() == []


def test_an_unknown_key_of_a_run_file_names_the_nearest(redis_url: str, bus: Bus, run_file: Path) -> None:
    run_file.write_text(run_file.read_text() + 'bounderies = "eagle3"\n')
    assert_one_line(submit(run_file, redis_url), 2, "bounderies", "boundaries")


def test_samples_that_cannot_be_used_are_rejected_each_with_its_reason(
    tmp_path: Path, redis_url: str, bus: Bus, run_file: Path, site: Site
) -> None:
    bus.sites.register(site, 60)
    bad = [
        {"input_ids": [5, 999_999], "loss_mask": [1, 1]},
        {"input_ids": [5, 6], "loss_mask": [1]},
        {"input_ids": [], "loss_mask": []},
    ]
    with (tmp_path / "data.jsonl").open("a") as file:
        file.writelines(json.dumps(sample) + "\n" for sample in bad)
    result = submit(run_file, redis_url)
    assert result.returncode == 0, result
    for word in ("6 samples", "3 of them rejected", "vocabulary 1", "mask_length 1", "empty 1"):
        assert word in result.stdout


def test_a_run_without_one_usable_sample(tmp_path: Path, redis_url: str, bus: Bus, run_file: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n{"input_ids": [], "loss_mask": []}\n')
    words = ("not one of 2 samples", "empty 1, unknown_form 1", "data.jsonl:1")
    assert_one_line(submit(run_file, redis_url), 2, *words)
    assert bus.runs.names() == []


def test_a_checkpoints_own_code_is_said_to_be_never_run(
    tmp_path: Path, redis_url: str, bus: Bus, run_file: Path, site: Site
) -> None:
    bus.sites.register(site, 60)
    run_file.write_text(run_file.read_text() + "trust_remote_code = true\n")
    assert_one_line(submit(run_file, redis_url), 0, str(run_file), "trust_remote_code", "ever run")


def test_an_output_folder_of_another_run(tmp_path: Path, tiny: Path, redis_url: str, bus: Bus, site: Site) -> None:
    bus.sites.register(site, 60)
    first = write_run_file(tmp_path, write_samples(tmp_path / "a.jsonl", 3), tiny, name="first")
    second = write_run_file(tmp_path, write_samples(tmp_path / "b.jsonl", 4), tiny, name="second")
    assert submit(first, redis_url).returncode == 0
    assert_one_line(submit(second, redis_url), 4, "another extraction", "'second', not 'first'")
    assert bus.runs.names() == ["first"]


def test_an_output_folder_of_another_spec(tmp_path: Path, tiny: Path, redis_url: str, bus: Bus, site: Site) -> None:
    bus.sites.register(site, 60)
    data = write_samples(tmp_path / "a.jsonl", 3)
    assert submit(write_run_file(tmp_path, data, tiny), redis_url).returncode == 0
    changed = write_run_file(tmp_path, data, tiny, final_state="post_norm")
    assert_one_line(submit(changed, redis_url), 4, "final_state", "post_norm")


def test_no_redis(run_file: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert_one_line(submit(run_file, url), 3, url, "HEADRACE_REDIS_URL")


def test_a_wrong_redis_password(tmp_path: Path, run_file: Path) -> None:
    with ValkeyServer(tmp_path / "redis", password="right") as server:
        assert_one_line(submit(run_file, server.url), 2, "password", "HEADRACE_REDIS_PASSWORD_FILE")
        wrong = submit(run_file, server.url, HEADRACE_REDIS_PASSWORD="wrong")
        assert_one_line(wrong, 2, "password", "HEADRACE_REDIS_PASSWORD_FILE")
        dispatcher = headrace(script="dispatcher", HEADRACE_REDIS_URL=server.url, HEADRACE_REDIS_PASSWORD="wrong")
        assert_one_line(dispatcher, 2, "password")


def test_no_engine(tmp_path: Path, redis_url: str, bus: Bus, run_file: Path) -> None:
    assert_one_line(submit(run_file, redis_url), 3, "no engine is registered", "headrace doctor")
    assert bus.runs.names() == []
    queued = submit(run_file, redis_url, "--no-engine-check")
    assert queued.returncode == 0
    assert bus.runs.names() == ["test"]


@pytest.mark.parametrize(
    ("change", "word"), [({"engine_model": "other"}, "model 'tiny'"), ({"final_state": "post_norm"}, "final state")]
)
def test_an_engine_of_another_model_or_form(
    tmp_path: Path, tiny: Path, redis_url: str, bus: Bus, site: Site, change: dict[str, str], word: str
) -> None:
    bus.sites.register(site, 60)
    run_file = write_run_file(tmp_path, write_samples(tmp_path / "data.jsonl", 3), tiny, **change)
    assert_one_line(submit(run_file, redis_url), 4, "no engine can serve", word)
    assert bus.runs.names() == []


def test_an_engine_of_other_boundaries(tmp_path: Path, tiny: Path, redis_url: str, bus: Bus, site: Site) -> None:
    bus.sites.register(site, 60)
    run_file = write_run_file(tmp_path, write_samples(tmp_path / "data.jsonl", 3), tiny)
    run_file.write_text(run_file.read_text() + "boundaries = [1, 2]\n")
    assert_one_line(submit(run_file, redis_url), 4, "boundaries [2, 4, 5]", "[1, 2]")


def test_a_dump_folder_that_is_watched_already(tmp_path: Path, redis_url: str) -> None:
    environ = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_DUMP_DIR": str(tmp_path / "dumps")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    first = subprocess.Popen(
        [sys.executable, "-c", "from headrace_watcher.main import run; run()"],
        env={**clean, **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stderr is not None
        assert "watching" in first.stderr.readline()
        assert_one_line(headrace(script="watcher", **environ), 4, str(tmp_path / "dumps"), str(first.pid))
    finally:
        first.terminate()
        assert first.wait(15) == 0
        assert first.stderr is not None
        first.stderr.close()


def test_a_dump_folder_that_cannot_be_used(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "dumps")
    assert_one_line(headrace(script="watcher", HEADRACE_REDIS_URL=redis_url, HEADRACE_DUMP_DIR=place), 2, place)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write to, not even root."""
    place = tmp_path / "read-only"
    place.mkdir()
    with read_only_mount(place):
        yield place


def test_a_dump_folder_that_is_not_writable(read_only: Path, redis_url: str) -> None:
    environ = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_DUMP_DIR": str(read_only)}
    assert_one_line(headrace(script="watcher", **environ), 2, str(read_only))


def test_an_output_folder_that_is_not_writable(
    tmp_path: Path, tiny: Path, read_only: Path, redis_url: str, bus: Bus
) -> None:
    data = write_samples(tmp_path / "data.jsonl", 3)
    run_file = write_run_file(tmp_path, data, tiny, output=str(read_only / "dataset"))
    assert_one_line(submit(run_file, redis_url), 2, str(read_only / "dataset"), "cannot be written")
    assert bus.runs.names() == []


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_writers_dump_folder_that_is_a_file(tmp_path: Path, redis_url: str, below: str) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / below)
    environ = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_DUMP_DIR": place}
    assert_one_line(headrace(script="writer", HEADRACE_LOG_LEVEL="error", **environ), 2, place, "HEADRACE_DUMP_DIR")


@pytest.mark.parametrize("script", ["dispatcher", "watcher", "writer"])
def test_services_take_no_arguments_and_say_what_they_do(script: str) -> None:
    asked = headrace("--help", script=script)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith(f"headrace-{script} ")
    assert_one_line(headrace("--port", "1", script=script), 2, "--port 1", "--help")


def test_settings_that_do_not_go_together() -> None:
    words = ("HEADRACE_SITE_TTL_SECONDS", "HEADRACE_HEARTBEAT_SECONDS (60)", "180 or more")
    assert_one_line(headrace(script="watcher", HEADRACE_HEARTBEAT_SECONDS="60"), 2, *words)


def test_a_setting_that_is_unknown_or_wrong() -> None:
    assert_one_line(headrace("list", HEADRACE_REDIS_ULR="x"), 2, "HEADRACE_REDIS_ULR", "HEADRACE_REDIS_URL")
    assert_one_line(headrace("list", HEADRACE_WINDOW="many"), 2, "HEADRACE_WINDOW")
    assert_one_line(headrace(script="watcher", HEADRACE_ENGINE_URL="foo"), 2, "HEADRACE_ENGINE_URL", "http://HOST:PORT")


def test_a_run_that_is_unknown(redis_url: str, bus: Bus) -> None:
    for command in ("status", "pause", "resume", "cancel"):
        assert_one_line(headrace(command, "nobody", HEADRACE_REDIS_URL=redis_url), 2, "nobody", "submit")


def test_a_folder_that_holds_no_dataset(tmp_path: Path) -> None:
    assert_one_line(headrace("verify", tmp_path), 2, str(tmp_path), "no headrace.json")
