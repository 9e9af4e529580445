"""Answers a request as a faulty server, or a faulty way to it, would."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from headrace.errors import Unavailable, UsageError
from headrace_engine.engine import Engine
from headrace_engine.faults.plan import Fault, Kind

_PAGE = "<html><body><h1>It works!</h1></body></html>"


class Serve(Protocol):
    """Answers the request as it should be; with `aborted`, as one that was aborted before it ran."""

    async def __call__(self, *, aborted: bool = False) -> Response: ...


async def misbehave(fault: Fault, engine: Engine, rid: str, prompt: Sequence[int], serve: Serve) -> Response:
    """Answer a request that a plan hits; faults that act elsewhere leave the answer alone.

    Raises:
        Unavailable: the fault is a 503.
        UsageError: the fault is a 400.
    """
    match fault.kind:
        case Kind.UNAVAILABLE:
            raise Unavailable("the engine is overloaded (a provoked fault); try again later")
        case Kind.DUPLICATE_RID:
            engine.submit(rid, prompt, 0)
            raise UsageError(f"Duplicate request ID detected: {rid} is in flight; use a new one")
        case Kind.TOO_LONG:
            engine.submit(rid, [0], 0)  # SGLang's stub: it runs under the refused request's id
            raise UsageError(f"The input ({len(prompt)} tokens) is longer than the model's limit (a provoked fault)")
        case Kind.BAD_ANSWER:
            return HTMLResponse(_PAGE)
        case Kind.ABORT:  # a prompt that is split is aborted after its first part
            return await serve(aborted=len(prompt) <= engine.settings.chunk_tokens)
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
