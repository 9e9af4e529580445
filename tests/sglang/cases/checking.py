"""Checks of what an engine left in its dump folder, against states that transformers computed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from headrace.dumpfolder import read_card, read_dump, read_lost
from headrace.dumps import DUMP_SUFFIX, ENGINE_FILE, LOST_SUFFIX, DumpHeader, EngineCard, Lost
from headrace.ids import RequestId
from headrace.verdicts import Match, Requirement, judge
from tests.support.oracle import Oracle, agree
from tests.support.waiting import wait_until

SECONDS = 30.0


class Reference:
    """The states of prompts by one plain forward each, remembered."""

    def __init__(self, model: Path, boundaries: tuple[int, ...]) -> None:
        self._oracle = Oracle(model, boundaries)
        self._known: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def states(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        """`aux` [N, k*D] and `final` [N, D], pre-norm."""
        if ids not in self._known:
            states = self._oracle.states(list(ids))
            self._known[ids] = {name: state.clone() for name, state in states.items()}
        return self._known[ids]


class Folder:
    """An engine's dump folder, as a watcher would empty it."""

    def __init__(self, path: Path, reference: Reference) -> None:
        self.path = path
        self.reference = reference
        self.published: Counter[str] = Counter()
        self.lost_reasons: Counter[str] = Counter()

    @property
    def card(self) -> EngineCard:
        """The engine's card."""
        return read_card(self.path / ENGINE_FILE)

    def dump_path(self, rid: str) -> Path:
        """Where a request's dump is published."""
        return self.path / f"{rid}{DUMP_SUFFIX}"

    def notice_path(self, rid: str) -> Path:
        """Where the notice of a lost one is."""
        return self.path / f"{rid}{LOST_SUFFIX}"

    def wrong(self, path: Path) -> str:
        """What is wrong with a dump, by its own id and the reference; empty when nothing is."""
        return _wrong(path, self.reference, self.card)

    def is_half(self, rid: str) -> bool:
        """Whether some of a request's rows came, and not all."""
        return any(rid in path.name for path in self.path.glob(".*.part"))

    def wait_half(self, rid: str, timeout: float = SECONDS) -> None:
        """Wait until the request is in the middle of its chunks."""
        wait_until(lambda: self.is_half(rid), timeout, f"the first rows of {rid}")

    def wait_published(self, rid: str) -> Path:
        """Wait for a request's dump and leave it where it is."""
        path = self.dump_path(rid)
        wait_until(path.exists, SECONDS, path.name)
        return path

    def take(self, rid: str, ids: tuple[int, ...]) -> DumpHeader:
        """Wait for a request's dump, check it against the tokens that were sent and the reference, and remove it."""
        path, notice = self.dump_path(rid), self.notice_path(rid)
        wait_until(lambda: path.exists() or notice.exists(), SECONDS, path.name)
        assert path.exists(), read_lost(notice)
        assert RequestId.parse(rid).proves(read_dump(path).token_ids)
        with safe_open(path, framework="pt") as file:
            assert tuple(file.get_tensor("token_ids").tolist()) == ids
        assert self.wrong(path) == ""
        header = read_dump(path).header
        assert not notice.exists()
        path.unlink()
        self.published[rid] += 1
        assert self.published[rid] == 1, f"{rid} was published twice"
        return header

    def take_lost(self, rid: str) -> Lost:
        """Wait for the notice of a request that was lost, and remove it."""
        path = self.notice_path(rid)
        wait_until(lambda: path.exists() or self.dump_path(rid).exists(), SECONDS, path.name)
        assert path.exists(), f"{rid} was published: {read_dump(self.dump_path(rid)).header}"
        lost = read_lost(path)
        assert lost.boot == self.card.boot
        assert not self.dump_path(rid).exists()
        path.unlink()
        self.lost_reasons[lost.reason] += 1
        return lost

    def remove_notices(self) -> None:
        """Remove all notices, as a watcher would."""
        for path in self.path.glob(f"*{LOST_SUFFIX}"):
            path.unlink()

    def left(self) -> list[str]:
        """Files of requests, hidden ones too, that nobody took."""
        return sorted(path.name for path in self.path.iterdir() if "hr-" in path.name)


def _wrong(path: Path, reference: Reference, card: EngineCard) -> str:
    dump = read_dump(path)
    request = RequestId.parse(path.name.removesuffix(DUMP_SUFFIX))
    requirement = Requirement(
        boundaries=card.boundaries, final_state=card.final_state, hidden_size=card.hidden_size, identity=None
    )
    verdict = judge(dump, request, requirement)
    if not isinstance(verdict, Match):
        return f"{verdict.reason}: {verdict.detail}"
    with safe_open(path, framework="pt") as file:
        ids = tuple(file.get_tensor("token_ids").tolist())
        for name, wanted in reference.states(ids).items():
            if not agree(file.get_tensor(name), wanted):
                return f"{name} differs from the reference by up to {(file.get_tensor(name) - wanted).abs().max():g}"
    return ""
