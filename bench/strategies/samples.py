"""Prompts as a chat data set has them: system prompts that many share, a long tail, and many of one length."""

from __future__ import annotations

import random

VOCABULARY = 400  # of the tiny model
LONGEST = 2000
_LOWEST_ID = 3  # those below are special
_SHARED_LENGTHS, _SHARED_RATE = (48, 96), 0.35  # of each system prompt
_ONE_LENGTH, _ONE_LENGTH_RATE = 256, 0.15  # as of a set that was cut or packed
_MEDIAN, _SPREAD, _SHORTEST = 180, 0.8, 8


class Prompts:
    """An endless source of prompts; equal seeds give equal prompts, and all seeds share their system prompts."""

    def __init__(self, seed: int) -> None:
        shared = random.Random("system prompts")
        self._systems = [_ids(shared, length) for length in _SHARED_LENGTHS]
        self._random = random.Random(seed)

    def next(self) -> list[int]:
        """Draw a prompt of 8 to `LONGEST` token ids."""
        draw = self._random.random
        length = round(self._random.lognormvariate(0.0, _SPREAD) * _MEDIAN)
        length = _ONE_LENGTH if draw() < _ONE_LENGTH_RATE else min(max(length, _SHORTEST), LONGEST)
        chosen = draw()
        system = next((each for n, each in enumerate(self._systems, 1) if chosen < n * _SHARED_RATE), [])
        return (system + _ids(self._random, length))[:length]


def _ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(_LOWEST_ID, VOCABULARY) for _ in range(count)]
