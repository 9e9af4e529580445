"""What `headrace doctor` says: of Redis, dispatchers and sites, and of an engine that cannot be proven."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus, keys
from headrace.bus.values import DESTINATION_FULL, Site, Unregistered
from headrace.capturestats import CaptureStats, stats_file
from headrace.dumps import SITE_FILE
from headrace.errors import Conflict, HeadraceError, RedisAway, Unavailable, UsageError, VerificationFailed
from headrace.ids import RequestId
from headrace.settings import Settings
from headrace_cli.doctor import Finding, Options, conclude, diagnose, examine
from headrace_cli.doctor.canaries import CanaryRun
from headrace_cli.doctor.prompts import Prompt
from tests.support.bus_values import BOOT, SITE, make_attempt, make_site
from tests.support.commands import assert_one_line, headrace
from tests.support.dispatching import hanging_listener
from tests.support.http import StubServer
from tests.support.server import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


class Engine(StubServer):
    """An engine's HTTP side, without capture."""

    def __init__(self) -> None:
        self.info: Any = {"model_path": "m", "version": "0.5.23", "chunked_prefill_size": 16}
        self.generates: tuple[int, bytes] = (200, b'{"output_ids": [7]}')
        super().__init__()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        match path:
            case "/server_info":
                return 200, self.info if isinstance(self.info, bytes) else json.dumps(self.info).encode()
            case "/health":
                return 200, b""
            case "/generate":
                return self.generates
        return 404, b""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as stub:
        yield stub


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return Settings(redis_url=redis_url)


def register(bus: Bus, engine: Engine, **changes: Any) -> Site:
    site = make_site(url=engine.url, context_length=4096, max_tokens=10_000, dump_cap_bytes=1 << 30, **changes)
    bus.sites.register(site, 3600)
    return site


def ends(findings: list[Finding], url: str, error: type[HeadraceError], *words: str) -> None:
    """The last line says no, with these words."""
    with pytest.raises(error) as caught:
        conclude(findings, url)
    line = str(caught.value)
    assert type(caught.value) is error, line
    assert line.startswith("no: ")
    for word in words:
        assert word in line, line


def canary_run(bus: Bus, site: Site, checkpoint: Path | None = None, seconds: float = 0.01) -> CanaryRun:
    prompts = [Prompt(token_ids=(20, 21, 22), next_token=1), Prompt(token_ids=(30, 31, 32, 33), next_token=2)]
    return CanaryRun(bus, site, prompts, checkpoint, seconds=seconds)


def claimed(bus: Bus, run: str) -> RequestId:
    """The first sample as a dispatcher has it in flight."""
    assert bus.runs.feed(run, 0, ["", ""]) == 2
    attempt = make_attempt(0, run=run)
    assert bus.requests.claim(run, SITE, BOOT, [attempt]) == ["claimed"]
    return RequestId.parse(attempt.request)


def test_dispatchers_that_live_are_counted_and_none_is_a_finding(bus: Bus, settings: Settings) -> None:
    (finding,) = [finding for finding in examine(settings) if "dispatchers" in finding.what]
    assert (finding.what, finding.ok) == ("dispatchers alive: 0", False)
    assert "headrace-dispatcher" in finding.fix
    bus.dispatchers.beat("one", ttl=3600)
    bus.dispatchers.beat("two", ttl=3600)
    (finding,) = [finding for finding in examine(settings) if "dispatchers" in finding.what]
    assert (finding.what, finding.ok) == ("dispatchers alive: 2", True)


def test_a_registration_that_cannot_be_read_is_a_finding_that_says_why(bus: Bus, settings: Settings) -> None:
    bus.sites.register(make_site(), ttl=3600)
    bus.redis.hdel(keys.site(SITE), "fingerprint")
    (finding,) = [finding for finding in examine(settings) if SITE in finding.what]
    assert (finding.what, finding.ok) == (f"site {SITE} takes no requests", False)
    assert "fingerprint" in finding.fix
    assert "upgrade" in finding.fix


def test_a_watcher_that_does_not_register_says_why_and_one_that_is_gone_is_told(bus: Bus, settings: Settings) -> None:
    bus.sites.register(make_site("gone"), ttl=0.05)
    wait_until(lambda: not bus.sites.registered(), 5, "the registration to lapse")
    bus.sites.explain(Unregistered(site=SITE, url="http://e:1", why="the engine captures nothing: a seam"), ttl=3600)
    fixes = {finding.what: finding.fix for finding in examine(settings) if finding.ok is False}
    assert fixes[f"the watcher of site {SITE} does not register http://e:1"] == "the engine captures nothing: a seam"
    assert "no watcher speaks for it" in fixes["site gone is not registered"]


def test_memory_is_compared_with_its_limit(bus: Bus, settings: Settings) -> None:
    def memory() -> Finding:
        (finding,) = [finding for finding in examine(settings) if "Redis uses" in finding.what]
        return finding

    assert "no limit" in memory().what
    try:
        used = int(bus.redis.info("memory")["used_memory"])
        bus.redis.config_set("maxmemory", 10 * used)
        assert memory().ok
        bus.redis.config_set("maxmemory", int(1.1 * used))
        assert memory().ok is False
        assert "maxmemory" in memory().fix
    finally:
        bus.redis.config_set("maxmemory", 0)


@pytest.mark.parametrize("url", ["engine:30000", "http://", "ftp://e:1", "http://e:99999", " http://e:1"])
def test_a_url_that_is_none_is_refused(settings: Settings, url: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        list(diagnose(settings, Options(url=url)))


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "soon"])
def test_a_time_without_an_end_is_refused(redis_url: str, seconds: str) -> None:
    result = headrace("doctor", "http://127.0.0.1:9", "--timeout", seconds, HEADRACE_REDIS_URL=redis_url)
    assert result.returncode == 2
    assert "timeout" in result.stderr


def test_a_model_that_is_no_checkpoint_is_refused(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model"):
        list(diagnose(settings, Options(url="http://e:1", model=str(tmp_path))))


def test_the_command_ends_with_one_line_that_says_no(bus: Bus, redis_url: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = headrace("doctor", url, HEADRACE_REDIS_URL=redis_url)
    assert_one_line(result, 3, f"no: the engine at {url}", "Connection refused", "more, see above")
    assert "fix  dispatchers alive: 0" in result.stdout


def test_without_redis_the_engine_is_still_asked(engine: Engine) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    findings = list(diagnose(Settings(redis_url=nowhere), Options(url=engine.url)))
    assert findings[0].ok
    ends(findings, engine.url, RedisAway, "Redis at", nowhere)


def test_a_page_of_a_proxy_and_what_hangs_are_told(bus: Bus, settings: Settings, engine: Engine) -> None:
    engine.info = b"<html>Please log in</html>"
    ends(list(diagnose(settings, Options(url=engine.url))), engine.url, Unavailable, "Please log in")
    with hanging_listener() as url:
        ends(list(diagnose(settings, Options(url=url, seconds=0.2))), url, Unavailable, "does not answer in 0.2 s")


def test_an_engine_that_no_watcher_asks_is_told_with_what_is_there(
    bus: Bus, settings: Settings, engine: Engine
) -> None:
    bus.dispatchers.beat("one", ttl=3600)
    bus.sites.register(make_site(url="http://10.9.9.9:30000"), 3600)
    findings = list(diagnose(settings, Options(url=engine.url)))
    ends(findings, engine.url, Unavailable, "no watcher speaks for", "HEADRACE_ENGINE_URL", "http://10.9.9.9:30000")


def test_an_engine_whose_watcher_says_why_it_is_not_registered_is_told_that(
    bus: Bus, settings: Settings, engine: Engine
) -> None:
    bus.dispatchers.beat("one", ttl=3600)
    bus.sites.explain(Unregistered(site=SITE, url=engine.url, why="the canary failed: layers"), ttl=3600)
    ends(list(diagnose(settings, Options(url=engine.url))), engine.url, Unavailable, SITE, "the canary failed: layers")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"model_path": "other"}, ("it serves other", "the site's engine m")),
        ({"model_path": "m", "headrace": {"boot": "another"}}, ("boot another", "boot1")),
    ],
)
def test_an_engine_that_is_not_the_sites_is_told(
    bus: Bus, settings: Settings, engine: Engine, told: dict[str, Any], words: tuple[str, ...]
) -> None:
    bus.dispatchers.beat("one", ttl=3600)
    register(bus, engine)
    engine.info = told
    findings = [finding for finding in diagnose(settings, Options(url=engine.url)) if "writers" not in finding.what]
    ends(findings, engine.url, Conflict, "is not that of site", *words)


def test_each_site_of_an_engine_of_several_nodes_is_looked_at(bus: Bus, settings: Settings, engine: Engine) -> None:
    bus.dispatchers.beat("one", ttl=3600)
    bus.sites.register(make_site("one", url=engine.url), 3600)
    bus.sites.register(make_site("two", url=engine.url), 3600)
    told = [finding.what for finding in diagnose(settings, Options(url=engine.url)) if "writers 0" in finding.what]
    assert [what.split()[1] for what in told] == ["one", "two"]


def test_what_capture_says_of_itself_is_told_where_its_folder_is_here(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    site = make_site()
    bus.sites.register(site, 3600)
    stats = CaptureStats(
        boot=site.boot,
        published=7,
        published_bytes=1,
        lost={"evicted": 2},
        ignored=0,
        half_assembled=0,
        forwards=9,
        forward_ms_p50=0.125,
        forward_ms_p99=1.5,
        forward_ms_max=2.0,
        waited_ms=0.0,
        buffer_bytes=0,
        ring_bytes=1,
        pinned_bytes=1,
        device_bytes=0,
    )
    (tmp_path / stats_file(site.boot)).write_bytes(stats.encode())

    def told() -> list[str]:
        settings = Settings(redis_url=redis_url, dump_dir=tmp_path)
        return [finding.what for finding in examine(settings) if "capture published" in finding.what]

    assert told() == []
    (tmp_path / SITE_FILE).write_text("another\n")
    assert told() == []
    (tmp_path / SITE_FILE).write_text(f"{SITE}\n")
    (text,) = told()
    assert "published 7 requests and lost evicted 2" in text
    (tmp_path / stats_file(site.boot)).write_bytes(b"{}")
    assert told() == []


def test_nothing_is_sent_without_a_writer_or_a_dispatcher(bus: Bus, settings: Settings, engine: Engine) -> None:
    register(bus, engine)
    engine.generates = (500, b"must not be asked")
    findings = list(diagnose(settings, Options(url=engine.url)))
    bad = [finding.what for finding in findings if finding.ok is False]
    assert [what for what in bad if "dispatchers alive: 0" in what or "writers 0" in what] == [
        "dispatchers alive: 0",
        f"site {SITE} at {engine.url}: writers 0, captured and not stored 0, jobs queued 0",
    ]
    assert not [finding for finding in findings if "next token" in finding.what or "canaries" in finding.what]
    assert bus.runs.names() == []


def test_the_run_is_kept_to_the_site_and_taken_back(bus: Bus, tmp_path: Path) -> None:
    place = tmp_path / "rows"
    with canary_run(bus, make_site()) as run:
        spec = run.submit(place, keep=False)
        view = bus.runs.get(run.name)
        assert view is not None
        assert (view.state, view.only_site, view.spec.total) == ("active", SITE, 2)
        assert view.spec == spec
        assert (place / "inputs" / "samples.jsonl").is_file()
        assert run.wait().fix.startswith("no dispatcher read the samples")
    assert run.left == ""
    assert not place.exists()
    view = bus.runs.get(run.name)
    assert view is not None
    assert view.state == "cancelled"
    names = [name.decode() for name in bus.redis.keys(f"hr:run:{run.name}*")]
    assert names
    assert all(0 < bus.redis.pttl(name) <= 3_600_000 for name in names)


def test_a_folder_that_was_there_stays_and_one_that_is_used_is_not_touched(bus: Bus, tmp_path: Path) -> None:
    empty, used = tmp_path / "empty", tmp_path / "used"
    empty.mkdir()
    used.mkdir()
    (used / "precious").touch()
    with canary_run(bus, make_site()) as run:
        run.submit(empty, keep=False)
    assert list(empty.iterdir()) == []
    with pytest.raises(Conflict, match="is not empty"), canary_run(bus, make_site()) as run:
        run.submit(used, keep=False)
    assert [path.name for path in used.iterdir()] == ["precious"]
    with canary_run(bus, make_site()) as run:
        run.submit(empty, keep=True)
    assert (empty / "inputs").is_dir()


def test_a_folder_that_cannot_be_made_is_named(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--output"), canary_run(bus, make_site()) as run:
        run.submit(tmp_path / "file" / "rows", keep=False)
    assert bus.runs.names() == []


def test_another_models_checkpoint_is_refused(bus: Bus, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(UsageError, match="hidden size"), canary_run(bus, make_site(), tmp_path) as run:
        run.submit(tmp_path / "rows", keep=False)
    assert not (tmp_path / "rows").exists()


def test_a_destination_that_a_writer_does_not_see_is_told_with_its_words(bus: Bus, tmp_path: Path) -> None:
    with canary_run(bus, make_site(), seconds=60) as run:
        run.submit(tmp_path / "rows", keep=False)
        bus.runs.pause(run.name, f"{tmp_path / 'rows'} does not hold the inputs of run {run.name}: mount it")
        finding = run.wait()
    assert finding.ok is False
    assert "the run was paused" in finding.what
    assert "does not hold the inputs" in finding.fix
    assert "--output" in finding.fix


def test_a_destination_that_a_dispatcher_does_not_see_is_told_with_its_words(bus: Bus, tmp_path: Path) -> None:
    with canary_run(bus, make_site()) as run:
        run.submit(tmp_path / "rows", keep=False)
        bus.runs.say_waiting(run.name, "/data: No such file or directory")
        finding = run.wait()
    assert "the run waits" in finding.what
    assert "No such file" in finding.fix
    assert "--output" in finding.fix


def test_refused_dumps_are_wrong_states_and_lost_ones_are_not(bus: Bus, tmp_path: Path) -> None:
    site = make_site(max_tokens=100, dump_cap_bytes=1 << 20)
    for reason, kind, error in (
        ("token_content", "mismatch", VerificationFailed),
        ("no_room", "loss", Unavailable),
        ("http_400", "error", Unavailable),
    ):
        with canary_run(bus, site) as run:
            run.submit(tmp_path / reason, keep=False)
            bus.sites.register(site, 3600)
            bus.requests.end(claimed(bus, run.name), burn=True, kind=kind, reason=reason)  # type: ignore[arg-type]
            finding = run.wait()
        assert finding.ok is False
        assert finding.error is error
        assert f"{reason} 1" in finding.what


def test_what_is_under_way_keeps_its_folder_and_is_named(bus: Bus, tmp_path: Path) -> None:
    site = make_site(max_tokens=100, dump_cap_bytes=1 << 20)
    with canary_run(bus, site) as run:
        run.submit(tmp_path / "rows", keep=False)
        bus.sites.register(site, 3600)
        claimed(bus, run.name)
        assert "no dump was proven yet" in run.wait().fix
    assert "still under way" in run.left
    assert f"remove {tmp_path / 'rows'}" in run.left
    assert (tmp_path / "rows").is_dir()


def test_a_full_destination_is_told_as_such(bus: Bus, tmp_path: Path) -> None:
    with canary_run(bus, make_site(), seconds=60) as run:
        run.submit(tmp_path / "rows", keep=False)
        bus.runs.pause(run.name, DESTINATION_FULL)
        finding = run.wait()
    assert finding.ok is False
    assert finding.fix.startswith(f"destination full: make room in {tmp_path / 'rows'}")


def test_a_place_for_temporary_files_that_takes_none_is_told(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="TMPDIR"), canary_run(bus, make_site()) as run:
        run.submit(tmp_path / "rows", keep=False)
    assert list(tmp_path.iterdir()) == []
    assert bus.runs.names() == []


def test_a_run_whose_doctor_was_killed_has_an_end_of_its_own(bus: Bus, tmp_path: Path) -> None:
    with canary_run(bus, make_site(), seconds=60) as run:
        run.submit(tmp_path / "rows", keep=False)
        view = bus.runs.get(run.name)
        assert view is not None
        assert view.only_until is not None
        assert 60 < view.only_until - view.created_at < 300


def test_a_wait_that_is_broken_off_leaves_a_run_that_ends_and_says_so(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(self: CanaryRun) -> bool:
        raise SystemExit(143)

    monkeypatch.setattr(CanaryRun, "_under_way", again)
    with pytest.raises(SystemExit), canary_run(bus, make_site()) as run:
        run.submit(tmp_path / "rows", keep=False)
    assert f"remove {tmp_path / 'rows'}" in run.left
    names = bus.redis.keys(f"hr:run:{run.name}*")
    assert names
    assert all(0 < bus.redis.pttl(name) <= 3_600_000 for name in names)


def test_statistics_of_another_boot_are_not_told(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    site = make_site()
    bus.sites.register(site, 3600)
    (tmp_path / SITE_FILE).write_text(f"{SITE}\n")
    (tmp_path / stats_file(site.boot)).write_text('{"boot": "another", "published": 1' + "0" * 400 + "}")
    findings = examine(Settings(redis_url=redis_url, dump_dir=tmp_path))
    assert not [finding for finding in findings if "capture published" in finding.what]
