"""A model's own chat template, sandboxed, and the character spans that its `{% generation %}` markers enclose."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import UsageError
from headrace_dispatcher.samples import SampleReason, Unusable

Span = tuple[int, int]
# Unicode noncharacters, reserved for a program's own use: no text has them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"([{_OPEN}{_CLOSE}])")
# What a template's expressions can raise on messages that it was not written for.
_FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
)  # fmt: skip


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which leaves its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface
    used = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("enclose"), [], [], body).set_lineno(line)

    def enclose(self, caller: Macro) -> str:
        """The body's text."""
        return str(caller())


class _MarkedGeneration(_Generation):
    """The same with a mark on each side; marks survive macros and captured blocks, where positions do not."""

    def enclose(self, caller: Macro) -> str:
        """The body's text between marks."""
        return f"{_OPEN}{caller()}{_CLOSE}"


class ChatTemplate:
    """Renders messages as `transformers` does: the same environment, globals, filters and variables."""

    def __init__(self, source: str, where: str, variables: Mapping[str, str]) -> None:
        """Compile `source`; `where` names it in messages, `variables` are the special tokens by name.

        Raises:
            UsageError: the template's syntax is wrong.
        """
        # One time for the whole life, or the renderings of one conversation could differ at midnight.
        self._now = datetime.now()
        self._variables = dict(variables)
        plain, marked = self._environment(_Generation), self._environment(_MarkedGeneration)
        try:
            self._plain, self._marked = plain.from_string(source), marked.from_string(source)
        except TemplateSyntaxError as error:
            raise UsageError(f"{where}: line {error.lineno}: {error.message}; mend the chat template") from error
        self.has_markers: bool = any(getattr(entry, "used", False) for entry in plain.extensions.values())

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """The text of a conversation; with `prompt`, the opening of an assistant's turn after it.

        Raises:
            Unusable: the template refuses the messages or fails on them.
        """
        return self._run(self._plain, messages, tools, prompt)

    def marked_spans(self, messages: Sequence[Any], tools: Sequence[Any] | None, text: str) -> list[Span]:
        """The spans of `text`, the rendering of these messages, that the template's markers enclose, in order.

        Raises:
            Unusable: the template makes other text of a marked body than of a plain one.
        """
        pieces: list[str] = []
        spans: list[Span] = []
        position = depth = start = 0
        for piece in _MARK.split(self._run(self._marked, messages, tools, False)):
            if piece == _OPEN:
                start, depth = (start if depth else position), depth + 1
            elif piece == _CLOSE:
                depth -= 1
                if depth == 0 and position > start:
                    spans.append((start, position))
            else:
                pieces.append(piece)
                position += len(piece)
        if depth or "".join(pieces) != text:
            raise Unusable(SampleReason.UNRENDERABLE, "the template changes text around its {% generation %} markers")
        return spans

    def _run(self, template: Any, messages: Sequence[Any], tools: Sequence[Any] | None, prompt: bool) -> str:
        try:
            return str(
                template.render(
                    **self._variables, messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
                )
            )
        except _FAILURES as error:
            detail = f"the chat template failed: {type(error).__name__}: {error}"
            raise Unusable(SampleReason.UNRENDERABLE, detail) from error

    def _environment(self, generation: type[_Generation]) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._now.strftime
        return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
