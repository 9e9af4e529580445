"""The engine's prefix cache: what is shared, what is computed, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, DynamicCache

from headrace.errors import UsageError
from headrace_capture.forward import Forward
from headrace_engine.model import TargetModel
from headrace_engine.prefixes import PrefixCache
from headrace_engine.scheduler import Scheduler
from tests.support.engine import random_ids
from tests.support.tiny_models import tiny_llama

CHUNK = 16


class Seen:
    """In the place of a capture: keeps every forward."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []

    def forward(self, forward: Forward) -> dict[str, str]:
        self.forwards.append(forward)
        return {}

    def rows(self, rid: str) -> list[tuple[int, int]]:
        """First row and count of each part of a request."""
        return [(piece.prefix, piece.rows) for each in self.forwards for piece in each.pieces if piece.rid == rid]

    def final(self, rid: str) -> torch.Tensor:
        """The final states [T, D] that were computed for a request."""
        parts = []
        for each in self.forwards:
            begin = 0
            for piece in each.pieces:
                parts += [each.final[begin : begin + piece.rows]] if piece.rid == rid else []
                begin += piece.rows
        return torch.cat(parts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tiny_llama(tmp_path_factory.mktemp("model"))
    return TargetModel(folder, boundaries="eagle3", final_state="pre_norm", dtype="float32")


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def scheduler(model: TargetModel, seen: Seen) -> Iterator[Scheduler]:
    made = Scheduler(
        model, seen, chunk_tokens=CHUNK, max_running=8, max_queued=99, weight_version="w1",  # type: ignore[arg-type]
        on_failure=lambda _: None, prefix_cache=1000,
    )  # fmt: skip
    yield made  # each test starts it
    made.drain(0.0)
    assert made.join(20)


def test_a_prompt_again_computes_one_row_and_gives_the_same_states(scheduler: Scheduler, seen: Seen) -> None:
    scheduler.start()
    prompt = random_ids(40, seed=1)
    first = scheduler.submit("first", prompt, 1).result(20)
    again = scheduler.submit("again", prompt, 1).result(20)
    assert (first.cached, again.cached) == (0, 39)
    assert seen.rows("first") == [(0, 16), (16, 16), (32, 8)]
    assert seen.rows("again") == [(39, 1)]
    assert again.output_ids == first.output_ids
    torch.testing.assert_close(seen.final("again"), seen.final("first")[39:], rtol=1e-4, atol=1e-4)


def test_a_shared_beginning_is_computed_once(scheduler: Scheduler, seen: Seen, model: TargetModel) -> None:
    scheduler.start()
    system, question = random_ids(20, seed=2), random_ids(25, seed=3)
    scheduler.submit("first", system + random_ids(9, seed=4), 0).result(20)
    scheduler.submit("second", system + question, 0).result(20)
    assert seen.rows("second") == [(20, 16), (36, 9)]
    whole = model.forward(system + question, model.new_cache(), want_token=False)
    torch.testing.assert_close(seen.final("second"), whole.final[20:], rtol=1e-4, atol=1e-4)


def test_a_running_prompt_shares_its_finished_chunks(scheduler: Scheduler, seen: Seen) -> None:
    prompt = random_ids(40, seed=5)
    answers = [scheduler.submit(rid, prompt, 0) for rid in ("a", "b")]
    scheduler.start()
    assert [answer.result(20).cached for answer in answers] == [0, 32]
    assert seen.rows("b") == [(32, 8)]  # beside the last chunk of `a`, whose rows were not there yet


def test_prompts_of_different_extra_keys_never_share(scheduler: Scheduler, seen: Seen) -> None:
    scheduler.start()
    prompt = random_ids(10, seed=6)
    for rid, key in (("a", ""), ("b", "b"), ("c", "c"), ("d", "c")):
        scheduler.submit(rid, prompt, 0, extra_key=key).result(20)
    assert [seen.rows(rid) for rid in "abcd"] == [[(0, 10)], [(0, 10)], [(0, 10)], [(9, 1)]]


def test_what_was_used_the_longest_ago_is_dropped_first(model: TargetModel) -> None:
    prefixes = PrefixCache(30, like=model.new_cache())
    prompts = {name: random_ids(10, seed=seed) for seed, name in enumerate("abcd")}

    def use(name: str) -> int:
        cache = model.new_cache()
        rows = prefixes.fill("", prompts[name], cache)
        model.forward(prompts[name][rows:], cache, want_token=False)
        prefixes.keep("", prompts[name], cache)
        return rows

    assert [use(name) for name in "abc"] == [0, 0, 0]
    assert use("a") == 9
    assert use("d") == 0  # in the place of b
    assert prefixes.held == 30
    assert [use("a"), use("c"), use("b")] == [9, 9, 0]


def test_a_prompt_beyond_the_limit_is_not_kept(model: TargetModel) -> None:
    prefixes = PrefixCache(5, like=model.new_cache())
    cache = model.new_cache()
    prompt = random_ids(10, seed=7)
    model.forward(prompt, cache, want_token=False)
    prefixes.keep("", prompt, cache)
    assert prefixes.held == 0
    assert prefixes.fill("", prompt, model.new_cache()) == 0


@given(
    prompts=st.lists(
        st.tuples(st.sampled_from("xy"), st.lists(st.integers(0, 2), min_size=1, max_size=8)), max_size=30
    ),
    limit=st.integers(1, 40),
)
def test_the_rows_found_are_those_of_the_same_tokens(prompts: list[tuple[str, list[int]]], limit: int) -> None:
    """A layer's key of row i is made from the extra key and the tokens up to i, so that any mix-up shows."""
    prefixes = PrefixCache(limit, like=_cache("x", []))
    kept: list[tuple[str, list[int]]] = []
    for key, prompt in prompts:
        cache = DynamicCache()
        rows = prefixes.fill(key, prompt, cache)
        longest = max((_common(prompt[:-1], tokens) for other, tokens in kept if other == key), default=0)
        assert rows == longest if sum(len(tokens) for _, tokens in kept) <= limit else rows <= longest
        expected = _cache(key, prompt[:rows])
        if rows:
            assert torch.equal(cache.layers[0].keys, expected.layers[0].keys)  # type: ignore[arg-type, union-attr]
        prefixes.keep(key, prompt, _cache(key, prompt))
        kept.append((key, prompt))
        assert prefixes.held <= limit
    distinct = {(key, *tokens[:end]) for key, tokens in kept for end in range(1, len(tokens) + 1)}
    assert prefixes.held <= len(distinct)
    if len(distinct) <= limit:
        assert prefixes.held == len(distinct)


def test_a_model_that_forgets_rows_has_no_prefix_cache() -> None:
    config = AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=8)
    with pytest.raises(UsageError, match="--prefix-cache"):
        PrefixCache(10, like=DynamicCache(config=config))


def _cache(key: str, tokens: list[int]) -> DynamicCache:
    cache = DynamicCache()
    known = [float(hash((key, *tokens[: end + 1])) % 1_000_003) for end in range(len(tokens))]
    keys = torch.tensor(known).reshape(1, 1, -1, 1)
    cache.update(keys, keys, 0)
    return cache


def _common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
