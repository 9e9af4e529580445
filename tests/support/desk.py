"""A judge at work: its folder, and a run whose first samples are in flight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.bus import Bus
from headrace.bus.jobs import Serializer
from headrace.dumps import Stats
from headrace.ids import RequestId
from headrace.messages import StoreJob, decode
from headrace.quarantine import Quarantine
from headrace_watcher.folder import DumpFolder
from headrace_watcher.judging import Judge
from tests.support.stores import BOUNDARIES, RUN, Sample, make_sample, make_spec
from tests.support.watched import make_site, publish

GRACE, RETRY = 60.0, 1.0
SAMPLE = make_sample(0)
LAYERS = (*(str(boundary) for boundary in BOUNDARIES), "final")


def stats(**changes: Any) -> tuple[Stats, ...]:
    return tuple(replace(Stats(layer=name, not_finite=0, norm_min=1.0, norm_max=2.0), **changes) for name in LAYERS)


class Desk:
    """A judge, its folder, and a run whose first samples are in flight."""

    def __init__(self, bus: Bus, folder: DumpFolder, scratch: Path) -> None:
        self.bus, self.folder, self.scratch = bus, folder, scratch
        self.site = folder.site
        self.now = 1000.0
        self.judge = self.new_judge()
        spec = make_spec(scratch / "out", total=8)
        bus.runs.create(spec)
        bus.runs.activate(RUN)
        bus.runs.feed(RUN, 0, [""] * 8)
        bus.sites.register(make_site(self.site), 60)

    def new_judge(self, most_bytes: int = 1 << 20) -> Judge:
        quarantine = Quarantine(self.scratch / "quarantine", most_bytes)
        return Judge(self.bus, self.folder, quarantine, grace=GRACE, retry=RETRY)

    def look(self, seconds: float = 0.0) -> None:
        """One pass over the folder, so much later."""
        self.now += seconds
        listing = self.folder.scan()
        self.judge.begin()
        for entry in listing.dumps:
            self.judge.dump(entry, self.now)
        for entry in listing.notices:
            self.judge.notice(entry, self.now)
        self.judge.forget(listing)

    def dump(self, sample: Sample = SAMPLE, attempt: int = 0, **changes: Any) -> Path:
        return publish(self.folder.path, sample.request(attempt), sample.token_ids, **changes)

    def jobs(self) -> list[StoreJob]:
        found = []
        for job in self.bus.jobs.rq_queue(self.site).get_jobs():
            message = decode(Serializer.loads(job.data)[2][0])
            assert isinstance(message, StoreJob)
            found.append(message)
        return found

    def kept(self, request: RequestId) -> dict[str, str]:
        verdict: dict[str, str] = json.loads((self.scratch / "quarantine" / str(request) / "verdict.json").read_text())
        return verdict
