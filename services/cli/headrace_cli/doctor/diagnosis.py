"""One engine from end to end: its flags, its site, canaries through every part, and its own word for their states."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace import serverargs
from headrace.bus import Bus
from headrace.bus.values import Site
from headrace.errors import Conflict, HeadraceError, Unavailable, UsageError
from headrace.runs import RunSpec
from headrace.settings import Settings
from headrace_cli import console
from headrace_cli.doctor import surroundings
from headrace_cli.doctor.canaries import CanaryRun
from headrace_cli.doctor.findings import Finding, unchecked, well, wrong
from headrace_cli.doctor.folders import given_checkpoint, served_checkpoint, too_large
from headrace_cli.doctor.place import at_url
from headrace_cli.doctor.prompts import Prompt, draw, lengths
from headrace_cli.doctor.server import Server

_MOST_SECONDS = 60.0  # for one token
_INSTALL = "call the doctor where headrace[verify] is installed"
_NEXT_TOKENS = "lm_head(final) against the server's own next tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is asked for.

    `url` is the engine's; `model` the served checkpoint's folder or the word of a known model, empty for the engine's
    own path where that is here; `output` the folder of the canaries' dataset, None for a new one here, which `keep`
    leaves there; `seconds` is what they may take, and the engine for one token.
    """

    url: str
    model: str = ""
    output: Path | None = None
    keep: bool = False
    seconds: float = 120.0


def diagnose(settings: Settings, options: Options) -> Generator[Finding, None, None]:
    """Look at one engine; findings come as they are made, and what depends on a bad one is left out.

    Raises:
        UsageError: the URL is none of an engine, the model is no checkpoint, or the time is no number.
    """
    url = _checked_url(options.url)
    if not math.isfinite(options.seconds):
        raise UsageError(f"--timeout {options.seconds}: give a number of seconds")
    model = given_checkpoint(options.model)
    with Server(url, min(_MOST_SECONDS, options.seconds)) as server:
        info: Mapping[str, Any] = {}
        try:
            info = server.info()
        except Unavailable as error:
            yield wrong(f"the engine at {url}", str(error))
        else:
            yield from _flags(url, info)
        try:
            bus = Bus.from_settings(settings)
        except HeadraceError as error:
            yield surroundings.away(settings, error)
            return
        try:
            yield from _Diagnosis(settings, bus, server, info, options, model).findings()
        except HeadraceError as error:
            yield wrong("the doctor could not go on", str(error), type(error))
        finally:
            bus.close()


def _checked_url(url: str) -> str:
    try:
        return Settings(engine_url=url).engine_url
    except ValueError as error:
        raise UsageError(f"{url!r} is no engine's address; give http://HOST:PORT") from error


def _flags(url: str, info: Mapping[str, Any]) -> Iterator[Finding]:
    yield well(f"the engine at {url}: {info['model_path']}, version {info.get('version', 'unknown')}")
    problems = serverargs.problems(info)
    for problem in problems:
        yield wrong(f"server flag {problem.flag}: {problem.why}", problem.change)
    if not problems:
        yield well("server flags: none is in the way of capture")
    for note in serverargs.notes(info):
        yield well(f"server flags: {note}")


class _Diagnosis:
    """What is asked of one engine once Redis is there; `info` is empty where the engine does not answer."""

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        server: Server,
        info: Mapping[str, Any],
        options: Options,
        model: Path | None,
    ) -> None:
        self._bus = bus
        self._server = server
        self._info = info
        self._options = options
        self._dump_dir = settings.dump_dir
        self._checkpoint, self._no_checkpoint = served_checkpoint(info, model)

    def findings(self) -> Iterator[Finding]:
        yield from self._from_engine_to_rows()
        # How Redis is set up keeps nothing from working now: the first step is another one where there is another.
        yield from surroundings.redis(self._bus)

    def _from_engine_to_rows(self) -> Iterator[Finding]:
        dispatchers = surroundings.dispatchers(self._bus)
        yield dispatchers
        sites = yield from self._sites()
        for site in sites:
            yield from surroundings.look_at(self._bus, site, self._dump_dir)
        others = [finding for site in sites if (finding := _another(site, self._info)) is not None]
        yield from others
        working = [site for site in sites if self._bus.jobs.workers(site.site)]
        if working and not others and self._info and dispatchers.ok:
            yield from self._prove(working[0])

    def _sites(self) -> Generator[Finding, None, list[Site]]:
        """The sites whose engine this is: one, or one a node; none after a finding that says why."""
        url, registered = self._server.url, self._bus.sites.registered()
        found = at_url(registered, url)
        if found:
            return found
        explained = at_url(self._bus.sites.unregistered(), url)
        for entry in explained:
            yield wrong(f"the watcher of site {entry.site} does not register {url}", entry.why)
        if not explained:
            others = ", ".join(site.url for site in registered) or "none"
            start = (
                f"start headrace-watcher beside it, with HEADRACE_ENGINE_URL={url} and the engine's HEADRACE_DUMP_DIR"
            )
            yield wrong(f"no watcher speaks for {url}", f"{start} (engines that are registered: {others})")
        return []

    def _prove(self, site: Site) -> Iterator[Finding]:
        chunk = self._info.get("chunked_prefill_size")
        chosen, missing = lengths(site, chunk if isinstance(chunk, int) else None)
        if missing:
            yield unchecked("a prompt that is longer than the engine's chunk", missing)
        prompts: list[Prompt] = []
        until = time.monotonic() + self._options.seconds
        try:
            for length in chosen:
                if time.monotonic() > until:
                    raise Unavailable(
                        f"{len(prompts)} of {len(chosen)} came in {self._options.seconds:g} s: it is overloaded; "
                        "see the engine's log, or give a longer --timeout"
                    )
                taken = {prompt.next_token for prompt in prompts}
                prompts.append(draw(length, secrets.randbelow, self._server.next_token, taken))
        except Unavailable as error:
            yield wrong("the engine's own next tokens", str(error))
            return
        if not prompts:
            yield wrong(
                f"site {site.site} takes no prompt at all", "raise HEADRACE_MAX_TOKENS or HEADRACE_DUMP_CAP_BYTES"
            )
            return
        run = CanaryRun(self._bus, site, prompts, self._checkpoint, seconds=self._options.seconds)
        try:
            with run:
                yield from self._run(run, prompts)
        except (SystemExit, GeneratorExit):  # stopped, or nobody reads: findings are told no more
            if run.left:
                console.err.print(console.one_line(f"left behind: {run.left}"))
            raise
        if run.left:
            yield well(f"left behind: {run.left}")

    def _run(self, run: CanaryRun, prompts: Sequence[Prompt]) -> Iterator[Finding]:
        try:
            spec = run.submit(self._options.output, keep=self._options.keep)
            outcome = run.wait()
            yield outcome
            if outcome.ok:
                yield from self._look_at_rows(spec, prompts)
            if self._options.keep:
                yield well(f"the canaries' dataset stays in {spec.output}")
        except HeadraceError as error:
            yield wrong("the canaries", str(error), type(error))

    def _look_at_rows(self, spec: RunSpec, prompts: Sequence[Prompt]) -> Iterator[Finding]:
        if find_spec("numpy") is None:
            yield unchecked("that the rows are right", f"numpy is not here: {_INSTALL}")
            return
        from headrace_cli.doctor import rows

        yield from rows.verified(spec, self._why_not_recomputed(prompts))
        yield rows.kind_of_final(spec)
        if self._checkpoint is None:
            yield unchecked(_NEXT_TOKENS, self._no_checkpoint)
            return
        try:
            from headrace_cli.doctor.heads import next_tokens
        except Exception as error:  # noqa: BLE001 - a torch that is half installed raises anything
            yield unchecked(_NEXT_TOKENS, f"{type(error).__name__}: {str(error)[:200]}; {_INSTALL}")
            return
        try:
            yield next_tokens(spec, prompts, self._checkpoint)
        except UsageError as error:
            yield unchecked(_NEXT_TOKENS, str(error))

    def _why_not_recomputed(self, prompts: Sequence[Prompt]) -> str:
        if self._checkpoint is None:
            return self._no_checkpoint
        if quantization := self._info.get("quantization"):
            return f"the server's weights are quantised ({quantization}), which no forward in float32 repeats"
        return too_large(self._checkpoint, sum(len(prompt.token_ids) for prompt in prompts))


def _another(site: Site, info: Mapping[str, Any]) -> Finding | None:
    """A finding where the engine that answers here is not the one that the site's watcher asks."""
    told = info.get("headrace")
    boot = told.get("boot") if isinstance(told, dict) else None
    names = [name for name in (info.get("model_path"), info.get("served_model_name")) if isinstance(name, str)]
    if boot and boot != site.boot:
        said = f"it is boot {boot}, the site's is {site.boot}"
    elif names and site.model not in names:
        said = f"it serves {names[0]}, the site's engine {site.model}"
    else:
        return None
    fix = (
        "two engines share this address or this dump folder (an address such as 127.0.0.1 is another machine to each): "
        "give each its own, and each watcher the HEADRACE_ENGINE_URL and HEADRACE_DUMP_DIR of one"
    )
    return wrong(f"the engine that answers here is not that of site {site.site}: {said}", fix, Conflict)
