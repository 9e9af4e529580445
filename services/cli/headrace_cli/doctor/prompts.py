"""The prompts that an engine proves itself with: random, of different lengths, and followed by different tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.bus.values import Site
from headrace_dispatcher.plan import Limits, dump_bytes

_LENGTHS = (5, 16, 33, 64, 100, 150)
_BEYOND_CHUNK = 57  # tokens of a prompt that is longer than a chunk
_MOST_BYTES = 1 << 30  # of one dump: a doctor is no load test
_DRAWS = 3  # tries at a prompt whose next token no other one has
# Every vocabulary has these ids, and no model's special tokens for images or audio are among them.
LOWEST_ID, HIGHEST_ID = 20, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids, and the token that the engine itself says comes next."""

    token_ids: tuple[int, ...]
    next_token: int


def lengths(site: Site, chunk: int | None) -> tuple[list[int], str]:
    """How long the prompts are, in tokens, and why none is longer than the engine's chunk; empty if one is.

    `chunk` is in tokens; 0 or less is an engine that computes each prompt in one piece, None one that does not tell.
    """
    limits = Limits(caps=site.caps, context_length=site.context_length, bytes_per_token=site.bytes_per_token)
    chosen = [length for length in _LENGTHS if limits.could_take(length)]
    if chunk is None:
        return chosen, "the engine does not tell its chunk size"
    if chunk <= 0:
        return chosen, ""
    longest = chunk + _BEYOND_CHUNK
    if not limits.could_take(longest):
        return chosen, f"the site takes none of {longest} tokens"
    if dump_bytes(longest, limits) > _MOST_BYTES:
        return chosen, f"one of {longest} tokens is {dump_bytes(longest, limits) >> 20} MiB of states"
    return [*chosen, longest], ""


def draw(
    length: int, below: Callable[[int], int], next_token: Callable[[Sequence[int]], int], taken: set[int]
) -> Prompt:
    """Draw a prompt of `length` tokens, if possible one whose next token is not among those `taken`.

    `below(n)` draws a number from 0 to n - 1, `next_token` asks the engine. Its last third repeats its beginning: a
    model that was trained goes on with the repetition, so that different prompts have different next tokens, and each
    is far ahead of the others. Random text alone is followed by the same few tokens whatever it is.
    """
    period = length - length // 3
    draws = _DRAWS if length <= _LENGTHS[-1] else 1
    for attempt in range(draws):
        pattern = [LOWEST_ID + below(HIGHEST_ID - LOWEST_ID + 1) for _ in range(period)]
        token_ids = tuple((pattern + pattern)[:length])
        prompt = Prompt(token_ids=token_ids, next_token=next_token(token_ids))
        if prompt.next_token not in taken or attempt == draws - 1:
            break
    return prompt
