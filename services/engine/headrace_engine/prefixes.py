"""Keeps the keys and values of prompts, so that a prompt that begins as an earlier one does not compute that again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from headrace.errors import UsageError

_States = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each layer, [1, heads, T, head size]
_Edge = tuple[str, int]  # an extra key and a first token


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    parent: _Node | None = None
    extra_key: str = ""
    tokens: tuple[int, ...] = ()
    states: _States = ()
    children: dict[_Edge, _Node] = field(default_factory=dict)


class PrefixCache:
    """A radix tree of prompts by token, as SGLang's radix cache: prompts with different extra keys never share.

    It holds `limit` tokens at most; of more, those used the longest ago are dropped, the ends of prompts first. One
    thread owns it.

    Raises:
        UsageError: `like`, an empty cache of the model, forgets rows, so that no prefix can be taken from it.
    """

    def __init__(self, limit: int, *, like: Cache) -> None:
        if any(type(layer) is not DynamicLayer for layer in like.layers):
            raise UsageError("option --prefix-cache: only models that attend to all rows in every layer can have one")
        self._limit = limit
        self._held = 0
        self._root = _Node()
        # Oldest first. A node is touched no earlier than its children, so the oldest one has none.
        self._recent: dict[_Node, None] = {}

    @property
    def held(self) -> int:
        """Tokens whose keys and values are kept."""
        return self._held

    @torch.inference_mode()
    def fill(self, extra_key: str, prompt: Sequence[int], cache: Cache) -> int:
        """Put what is known of `prompt` into the empty `cache`; returns its rows, at most all but the last one."""
        path, rows = self._walk(extra_key, tuple(prompt[:-1]))
        if rows:
            parts = [_cut(node.states, 0, same) for node, same in path]
            for layer, states in enumerate(zip(*parts, strict=True)):
                keys, values = (torch.cat(tensors, dim=-2) for tensors in zip(*states, strict=True))
                cache.update(keys, values, layer)
            self._touch(path[-1][0])
        return rows

    @torch.inference_mode()
    def keep(self, extra_key: str, tokens: Sequence[int], cache: Cache) -> None:
        """Remember the first rows of `cache`, which are those of `tokens`."""
        tokens = tuple(tokens)
        path, rows = self._walk(extra_key, tokens)
        node = self._root
        if path:
            node, same = path[-1]
            if rows < len(tokens) and same < len(node.tokens):
                node = self._split(node, same)
        if rows < len(tokens):
            layers: Any = cache.layers  # all of them DynamicLayer, and filled
            states = tuple((layer.keys, layer.values) for layer in layers)
            leaf = _Node(
                parent=node, extra_key=extra_key, tokens=tokens[rows:], states=_copy(states, rows, len(tokens))
            )
            node.children[extra_key, tokens[rows]] = leaf
            self._held += len(leaf.tokens)
            node = leaf
        self._touch(node)
        while self._held > self._limit:
            self._drop(next(iter(self._recent)))

    def _walk(self, extra_key: str, tokens: tuple[int, ...]) -> tuple[list[tuple[_Node, int]], int]:
        """The nodes along `tokens`, each with how many of its tokens agree, and the sum of those."""
        path: list[tuple[_Node, int]] = []
        node, rows = self._root, 0
        while rows < len(tokens) and (child := node.children.get((extra_key, tokens[rows]))):
            same = _common(child.tokens, tokens[rows : rows + len(child.tokens)])
            path.append((child, same))
            rows += same
            if same < len(child.tokens):
                break
            node = child
        return path, rows

    def _split(self, lower: _Node, at: int) -> _Node:
        """Give the first `at` tokens of a node to a new one above it, and return that."""
        parent = lower.parent
        assert parent is not None
        upper = _Node(
            parent=parent, extra_key=lower.extra_key, tokens=lower.tokens[:at], states=_copy(lower.states, 0, at)
        )
        parent.children[upper.extra_key, upper.tokens[0]] = upper
        lower.states = _copy(lower.states, at, len(lower.tokens))
        lower.tokens, lower.parent = lower.tokens[at:], upper
        upper.children[lower.extra_key, lower.tokens[0]] = lower
        return upper

    def _touch(self, node: _Node) -> None:
        while node.parent is not None:
            self._recent.pop(node, None)
            self._recent[node] = None
            node = node.parent

    def _drop(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.extra_key, leaf.tokens[0]]
        del self._recent[leaf]
        self._held -= len(leaf.tokens)


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    if left == right:
        return len(left)
    return next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(right))


def _cut(states: _States, begin: int, end: int) -> _States:
    return tuple((keys[..., begin:end, :], values[..., begin:end, :]) for keys, values in states)


def _copy(states: _States, begin: int, end: int) -> _States:
    """As `_cut`, without holding the memory of the rows around."""
    return tuple((keys.clone(), values.clone()) for keys, values in _cut(states, begin, end))
