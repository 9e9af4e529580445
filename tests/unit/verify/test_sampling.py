"""The rows that are recomputed: the same ones each time, spread over lengths and ordinals."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headrace_cli.verify.sampling import choose


@given(lengths=st.lists(st.integers(0, 5000), max_size=80), count=st.integers(0, 100))
def test_the_sample_is_deterministic_and_of_the_asked_size(lengths: list[int], count: int) -> None:
    tokens = array("I", lengths)
    sound = [ordinal for ordinal, length in enumerate(lengths) if length]
    chosen = choose(tokens, count)
    assert chosen == choose(tokens, count) == sorted(set(chosen))
    assert len(chosen) == min(count, len(sound))
    assert set(chosen) <= set(sound)


def test_the_sample_spreads_over_lengths_and_ordinals() -> None:
    tokens = array("I", [10 + (ordinal * 7919) % 1000 for ordinal in range(1000)])
    chosen = choose(tokens, 8)
    lengths = sorted(tokens[ordinal] for ordinal in chosen)
    assert all(125 * index <= length - 10 < 125 * (index + 1) for index, length in enumerate(lengths))
    assert chosen[0] < 250
    assert chosen[-1] > 750
