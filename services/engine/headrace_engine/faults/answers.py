"""Answers a request as a faulty server, or a faulty way to it, would."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from headrace.errors import Unavailable, UsageError
from headrace_engine.faults.plan import Fault, Kind
from headrace_engine.steps import Answer

_PAGE = "<html><body><h1>It works!</h1></body></html>"


class Submit(Protocol):
    """Queues a prompt under the request's id and with the rest of what it asks for."""

    def __call__(self, prompt: Sequence[int], *, aborted: bool = False) -> Future[Answer]: ...


class Serve(Protocol):
    """Answers the request as it should be; with `aborted`, as one that was aborted before it ran."""

    async def __call__(self, *, aborted: bool = False) -> Response: ...


async def misbehave(
    fault: Fault, chunk_tokens: int, rid: str, prompt: Sequence[int], submit: Submit, serve: Serve
) -> Response:
    """Answer a request that a plan hits; faults that act elsewhere leave the answer alone.

    A step of the engine computes `chunk_tokens` of a prompt at most.

    Raises:
        Unavailable: the fault is a 503.
        UsageError: the fault is a 400.
    """
    match fault.kind:
        case Kind.UNAVAILABLE:
            raise Unavailable("the engine is overloaded (a provoked fault); try again later")
        case Kind.DUPLICATE_RID:
            submit(prompt)
            raise UsageError(f"Duplicate request ID detected: {rid} is in flight; use a new one")
        case Kind.TOO_LONG:
            submit([0])  # SGLang's stub: it runs under the refused request's id
            raise UsageError(f"The input ({len(prompt)} tokens) is longer than the model's limit (a provoked fault)")
        case Kind.BAD_ANSWER:
            return HTMLResponse(_PAGE)
        case Kind.ABORT:  # a prompt that is split is aborted after its first part
            return await serve(aborted=len(prompt) <= chunk_tokens)
        case Kind.SLOW:
            response = await serve()
            await asyncio.sleep(fault.seconds)
            return response
        case Kind.CUT:
            return _Cut.of(await serve())
    return await serve()


class _Cut(Response):
    """The first half of another answer, whose length the headers still tell; the connection is closed after it."""

    @classmethod
    def of(cls, whole: Response) -> _Cut:
        return cls(whole.body, whole.status_code, whole.headers)

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        half = bytes(self.body[: len(self.body) // 2])
        await send({"type": "http.response.body", "body": half, "more_body": True})
