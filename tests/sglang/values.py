"""Dumps of a server against what transformers computes for the same tokens, at every boundary of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from headrace.dumpfolder import read_dump
from headrace.dumps import DUMP_SUFFIX, POST_NORM, DumpHeader
from headrace.ids import RequestId
from headrace.verdicts import Match, Requirement, judge
from tests.sglang.server import SglangServer
from tests.support.engine import random_ids
from tests.support.oracle import Oracle
from tests.support.waiting import wait_until

DUMP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One prompt's dump: `boundaries` k tensors [N, D] and `final` [N, D], in float32 whatever the dump's dtype."""

    header: DumpHeader
    token_ids: list[int]
    boundaries: tuple[Tensor, ...]
    final: Tensor


class Truth:
    """What a checkpoint computes in float32, by transformers."""

    def __init__(self, model: Path) -> None:
        self._oracle = Oracle(model, ())
        self.layers = self._oracle.layers

    def boundaries(self, token_ids: list[int]) -> list[Tensor]:
        """Each boundary's states [N, D], b from 0 to L, then the final norm's output as entry L + 1."""
        states = self._oracle.everything(token_ids)
        return [*states, self._oracle.normed(states[-1])]


def capture(server: SglangServer, ordinal: int, token_ids: Sequence[int]) -> Captured:
    """Send a prompt as the dispatcher does, wait for its dump, and read it; its verdict must be a match."""
    request = RequestId.make("values", ordinal, "0a1b2c3d", token_ids)
    answer = server.generate(token_ids, rid=str(request))
    assert answer.status_code == 200, answer.text
    path = server.dump_dir / f"{request}{DUMP_SUFFIX}"
    wait_until(path.exists, DUMP_SECONDS, f"{path.name}; there is {sorted(p.name for p in server.dump_dir.iterdir())}")
    dump, card = read_dump(path), server.card()
    requirement = Requirement(
        boundaries=card.boundaries, final_state=card.final_state, hidden_size=card.hidden_size, identity=None
    )
    verdict = judge(dump, request, requirement)
    assert isinstance(verdict, Match), verdict
    with safe_open(path, framework="pt") as file:
        aux, final = file.get_tensor("aux").float(), file.get_tensor("final").float()
        ids = file.get_tensor("token_ids").tolist()
    assert ids == list(token_ids)
    return Captured(
        header=dump.header,
        token_ids=ids,
        boundaries=tuple(aux.split(card.hidden_size, dim=1)),
        final=final,
    )


def prompts(lengths: Sequence[int], *, shared: int) -> list[list[int]]:
    """Random prompts of these lengths, whose first `shared` tokens are the same."""
    head = random_ids(shared, seed=0)
    return [(head + random_ids(length, seed=place))[:length] for place, length in enumerate(lengths, start=1)]


def texts(model: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths out of the file with the demo's conversations, by the checkpoint's tokenizer."""
    text = (files("headrace_cli") / "data" / "conversations.jsonl").read_text()
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    starts = accumulate(lengths, initial=0)
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def assert_right(captured: Captured, truth: Truth, *, tolerance: float, apart: float) -> None:
    """Each state is its boundary's, and every other boundary is far off.

    `tolerance` is the largest |found - wanted| / |wanted| of a token; at each other boundary the largest difference of
    one value is at least `apart`. (By the relative measure neighbours are near at a first token, whose norm may be a
    hundred times those of the others and hardly changes from layer to layer.)
    """
    states = truth.boundaries(captured.token_ids)
    for place, found in _places(captured, truth):
        worst = float((torch.linalg.norm(found - states[place], dim=1) / torch.linalg.norm(states[place], dim=1)).max())
        assert worst <= tolerance, (captured.header.request, place, worst)
        others = [float((found - other).abs().max()) for other in states[:place] + states[place + 1 :]]
        assert min(others) >= apart, (captured.header.request, place, others)


def assert_near(captured: Captured, truth: Truth, *, tolerance: float, apart: float) -> None:
    """The same by the relative Frobenius norm over the rows, of both, for dtypes that round."""
    states = truth.boundaries(captured.token_ids)
    for place, found in _places(captured, truth):
        off = [float(torch.linalg.norm(found - other) / torch.linalg.norm(other)) for other in states]
        assert off[place] <= tolerance, (captured.header.request, place, off)
        assert min(off[:place] + off[place + 1 :]) >= apart, (captured.header.request, place, off)


def _places(captured: Captured, truth: Truth) -> list[tuple[int, Tensor]]:
    final = truth.layers + 1 if captured.header.final_state == POST_NORM else truth.layers
    named = zip((*captured.header.boundaries, final), (*captured.boundaries, captured.final), strict=True)
    return list(named)
