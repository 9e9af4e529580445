"""Renders a conversation with the model's own template into token ids and a loss mask over the assistant's tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

from tokenizers import Tokenizer

from headrace.errors import UsageError
from headrace_dispatcher.runfile import MaskRule
from headrace_dispatcher.samples import Conversation, SampleReason, Unusable
from headrace_dispatcher.template import ChatTemplate, Span

# Counts the changes of the rules below: a dataset's digest holds it.
MASK_VERSION = 1

_begin, _end = itemgetter(0), itemgetter(1)


def load_tokenizer(encoded: bytes, where: str) -> Tokenizer:
    """Make the tokenizer of a `tokenizer.json` so that it says all tokens of a text and where each lies in it.

    Truncation and padding, which the file may ask for, are off. The post-processor, whose special tokens the chat
    template has written already, is off too: it would trim white space from the offsets.

    Raises:
        UsageError: the file is not a tokenizer.
    """
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(encoded)
    except Exception as error:  # the library raises nothing narrower
        raise UsageError(f"{where}: not a tokenizer ({error}); save the tokenizer again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    return tokenizer


class Renderer:
    """Makes ids and mask of conversations, for one model and one mask rule."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, rule: MaskRule, max_length: int) -> None:
        """Use a tokenizer of `load_tokenizer`; `max_length` is in tokens."""
        self._template = template
        self._tokenizer = tokenizer
        self._rule = rule
        self._max_length = max_length

    def render(self, conversation: Conversation) -> tuple[list[int], bytes]:
        """The ids [N] of the conversation's text, tokenised once as a whole, and its mask [N], a byte 0 or 1 a token.

        Raises:
            Unusable: the template fails, the text is empty or too long, or no assistant's turn can be told apart.
        """
        text = self._template.render(conversation.messages, conversation.tools)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if not ids:
            raise Unusable(SampleReason.EMPTY, "the rendered text has no tokens")
        if len(ids) > self._max_length:
            raise too_long(len(ids), self._max_length)
        if self._rule == "all":
            return ids, b"\x01" * len(ids)
        return ids, mask_tokens(encoding.offsets, self._spans(conversation, text))

    def _spans(self, conversation: Conversation, text: str) -> list[Span]:
        turns = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if not turns:
            raise Unusable(SampleReason.NO_TRAINED_TOKENS, "no assistant turn")
        if self._rule == "last_assistant":
            turns = turns[-1:]
        if self._template.has_markers:
            spans = self._marked(conversation, text, turns)
        else:
            spans = [self._turn(conversation, text, index) for index in turns]
        return without_trailing_space(text, spans)

    def _marked(self, conversation: Conversation, text: str, turns: Sequence[int]) -> list[Span]:
        spans = self._template.marked_spans(conversation.messages, conversation.tools, text)
        if self._rule == "assistant":
            return spans
        before = self._template.render(conversation.messages[: turns[0]], conversation.tools) if turns[0] else ""
        _check_prefix(text, before, turns[0])
        return [span for span in spans if span[0] >= len(before)]

    def _turn(self, conversation: Conversation, text: str, index: int) -> Span:
        """The span of one turn: what the text has between the prompt that asks for it and its end."""
        messages, tools = conversation.messages, conversation.tools
        before = self._template.render(messages[:index], tools, prompt=True)
        _check_prefix(text, before, index)
        last = index + 1 == len(messages)
        upto = text if last else self._template.render(messages[: index + 1], tools)
        _check_prefix(text, upto, index)
        if len(upto) < len(before):
            raise _unstable(index)
        return len(before), len(upto)


def without_trailing_space(text: str, spans: Sequence[Span]) -> list[Span]:
    """Spans in order, those that touch joined, each without the white space that follows its end-of-turn token."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    trimmed = [(start, start + len(text[start:stop].rstrip())) for start, stop in joined]
    return [(start, stop) for start, stop in trimmed if start < stop]


def mask_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> bytes:
    """One byte a token: 1 where its characters overlap a span, so also for each part of a split character.

    A token that begins before a span and reaches into it counts, as in transformers.

    `offsets` [N] are the tokens' spans of characters, ascending; no span is empty.
    """
    mask = bytearray(len(offsets))
    for start, stop in spans:
        first = bisect_right(offsets, start, key=_end)
        after = bisect_left(offsets, stop, key=_begin)
        if first < after:
            mask[first:after] = b"\x01" * (after - first)
    return bytes(mask)


def too_long(tokens: int, max_length: int) -> Unusable:
    """The rejection of a sample that is longer than the run takes."""
    return Unusable(SampleReason.TOO_LONG, f"{tokens} tokens, more than max_length {max_length}")


def _check_prefix(text: str, prefix: str, index: int) -> None:
    if not text.startswith(prefix):
        raise _unstable(index)


def _unstable(index: int) -> Unusable:
    detail = (
        f"the chat template is not prefix-stable: what it writes before or in messages[{index}] changes with later "
        "messages, so the assistant's tokens cannot be told apart; use a template with {% generation %} markers"
    )
    return Unusable(SampleReason.UNRENDERABLE, detail)
