"""Runs one way of pairing under one set of conditions, and tells where its rows are."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests

from bench.strategies import dumper
from bench.strategies.by_counter import ByCounter
from bench.strategies.by_token_count import ByTokenCount
from bench.strategies.clear_and_scan import ClearAndScan
from bench.strategies.client import Server, Strategy
from bench.strategies.samples import LONGEST
from bench.strategies.traffic import Traffic
from headrace_cli.stack import Stack, StackConfig
from tests.support.engine import EngineProcess
from tests.support.pipeline import MODEL_NAME, QUICK, running, submit, wait_finished, write_run_file

BOUNDARIES = (2, 4, 5)
HEADRACE = "headrace"
STRATEGIES: dict[str, type[Strategy]] = {
    "by counter": ByCounter,
    "clear and scan": ClearAndScan,
    "by token count": ByTokenCount,
}
_TRAFFIC_SEED = 1_000_000  # beside any seed of samples
_RUN = "strategies"
_FINISH_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How a server is run and shared; `prefix_cache` and `step` are in tokens."""

    name: str
    concurrency: int
    prefix_cache: int
    step: int
    shared: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of headrace-engine."""
        return (
            "--boundaries", ",".join(map(str, BOUNDARIES)), "--threads", "1", "--log-level", "warning",
            "--chunk-tokens", str(self.step), "--prefix-cache", str(self.prefix_cache),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one way of pairing left: the row of each sample that got one, and what happened on the way.

    `short` dumps of the patched server lack rows, which came from the prefix cache or in an earlier step. `refused`
    dumps were mismatches, `again` counts attempts that ended without a row.
    """

    pairing: str
    conditions: Conditions
    rows: tuple[Path | None, ...]
    seconds: float
    probes: int
    chats: int
    short: int = 0
    refused: int = 0
    again: int = 0


def run_naive(name: str, conditions: Conditions, prompts: Sequence[Sequence[int]], model: Path, folder: Path) -> Trial:
    """Run one of `STRATEGIES` against a patched server of its own, in `folder`."""
    dumps, rows = folder / "dumps", folder / "rows"
    rows.mkdir(parents=True)
    paths = [rows / f"{ordinal}.safetensors" for ordinal in range(len(prompts))]
    command = (sys.executable, dumper.__file__, "--model", str(model), "--model-name", MODEL_NAME)
    environ = {"HEADRACE_DUMP_DIR": str(dumps.absolute())}
    with EngineProcess(folder, *conditions.flags, environ=environ, command=command) as engine:
        engine.wait_ready()
        strategy = STRATEGIES[name](Server(engine.url, dumps))

        def extract(ordinal: int) -> None:
            with contextlib.suppress(requests.RequestException):  # no answer, no row
                strategy.extract(prompts[ordinal], paths[ordinal])

        with _traffic(engine.url, conditions) as traffic, ThreadPoolExecutor(conditions.concurrency) as pool:
            begin = time.monotonic()
            list(pool.map(extract, range(len(prompts))))
            seconds = time.monotonic() - begin
        counts = engine.info()["headrace"]["capture"]
    return Trial(
        pairing=name,
        conditions=conditions,
        rows=tuple(path if path.exists() else None for path in paths),
        seconds=seconds,
        probes=traffic.probes,
        chats=traffic.chats,
        short=counts["short"],
    )


def run_headrace(conditions: Conditions, prompts: Sequence[Sequence[int]], model: Path, folder: Path) -> Trial:
    """Run the whole pipeline against an engine of the same flags, in `folder`."""
    folder.mkdir(parents=True)
    data = folder / "samples.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in prompts))
    run_file = write_run_file(folder, data, model, name=_RUN, max_length=LONGEST)
    environ = {**QUICK, "HEADRACE_MAX_REQUESTS": str(conditions.concurrency)}
    config = StackConfig(
        folder=folder / "stack", model=model, model_name=MODEL_NAME, engine=conditions.flags, environ=environ
    )
    stack = Stack(config)
    with running(stack) as bus, _traffic(stack.engine_url, conditions) as traffic:
        begin = time.monotonic()
        submit(bus, run_file)
        view = wait_finished(bus, _RUN, timeout=_FINISH_SECONDS)
        seconds = time.monotonic() - begin
    rows = {int(path.stem): path for path in (folder / "dataset" / "rows").rglob("*.safetensors")}
    return Trial(
        pairing=HEADRACE,
        conditions=conditions,
        rows=tuple(rows.get(ordinal) for ordinal in range(len(prompts))),
        seconds=seconds,
        probes=traffic.probes,
        chats=traffic.chats,
        refused=view.mismatches,
        again=sum(view.reasons.values()),
    )


@contextlib.contextmanager
def _traffic(url: str, conditions: Conditions) -> Iterator[Traffic]:
    traffic = Traffic(url, _TRAFFIC_SEED)
    with traffic if conditions.shared else contextlib.nullcontext():
        yield traffic
