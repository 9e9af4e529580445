"""The part of SGLang's HTTP interface that headrace uses."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.errors import HeadraceError, Unavailable, UsageError
from headrace_engine.engine import Engine
from headrace_engine.faults.answers import Submit, misbehave
from headrace_engine.steps import Answer


class SamplingParams(BaseModel):
    """The sampling parameters that are known; decoding is greedy whatever they say."""

    model_config = ConfigDict(extra="ignore")

    max_new_tokens: StrictInt = Field(default=128, ge=0)  # SGLang's default
    temperature: float = Field(default=1.0, ge=0)
    ignore_eos: bool = False


class GenerateBody(BaseModel):
    """One prompt as token ids; SGLang's other fields are taken and ignored."""

    model_config = ConfigDict(extra="ignore")

    input_ids: list[StrictInt]
    rid: str | None = Field(default=None, min_length=1)
    extra_key: str | None = None  # prompts of different ones share no prefix
    sampling_params: SamplingParams = SamplingParams()


class AbortBody(BaseModel):
    """Requests to abort: those whose id starts with `rid`, or all."""

    model_config = ConfigDict(extra="ignore")

    rid: str = ""
    abort_all: bool = False


def create_app(engine: Engine) -> Starlette:
    """Make the application; the engine may still be loading."""

    async def generate(request: Request) -> Response:
        body = _decode(GenerateBody, await request.body())
        rid = body.rid or uuid.uuid4().hex
        submit = _submission(engine, rid, body)
        serve = partial(_serve, engine, request, rid, body, submit)
        # Nothing is awaited before the request is submitted, so that what was checked here still holds then.
        fault = engine.fault(rid, body.input_ids)
        if fault is None:
            return await serve()
        return await misbehave(fault, engine.settings.chunk_tokens, rid, body.input_ids, submit, serve)

    async def health(_request: Request) -> Response:
        return Response(status_code=200 if engine.ready else 503)

    async def health_generate(_request: Request) -> Response:
        await asyncio.wrap_future(engine.probe())
        return Response(status_code=200)

    async def model_info(_request: Request) -> Response:
        name = engine.settings.name
        return JSONResponse(
            {
                "model_path": name,
                "tokenizer_path": name,
                "is_generation": True,
                "weight_version": engine.settings.weight_version,
            }
        )

    async def server_info(_request: Request) -> Response:
        return JSONResponse(engine.info())

    async def abort_request(request: Request) -> Response:
        body = _decode(AbortBody, await request.body())
        if not body.rid and not body.abort_all:
            raise UsageError("abort_request: give a rid, or abort_all")
        engine.abort("" if body.abort_all else body.rid)
        return Response(status_code=200)

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST", "PUT"]),
            Route("/health", health),
            Route("/health_generate", health_generate),
            Route("/get_model_info", model_info),
            Route("/get_server_info", server_info),
            Route("/abort_request", abort_request, methods=["POST", "GET"]),
        ],
        exception_handlers={HeadraceError: _error},
    )


_Body = TypeVar("_Body", bound=BaseModel)


def _decode(kind: type[_Body], data: bytes) -> _Body:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{place or 'body'}: {first['msg']}; send one prompt as a list of token ids") from error


def _submission(engine: Engine, rid: str, body: GenerateBody) -> Submit:
    sampling = body.sampling_params
    return partial(
        engine.submit,
        rid,
        max_new_tokens=sampling.max_new_tokens,
        ignore_eos=sampling.ignore_eos,
        extra_key=body.extra_key or "",
    )


async def _serve(
    engine: Engine, request: Request, rid: str, body: GenerateBody, submit: Submit, *, aborted: bool = False
) -> Response:
    future = submit(body.input_ids, aborted=aborted)
    answer = await _unless_gone(request, future)
    if answer is None:
        engine.withdraw(rid)
        return Response(status_code=499)  # nobody reads it
    return JSONResponse(_result(engine, rid, body, answer))


async def _unless_gone(request: Request, future: Future[Answer]) -> Answer | None:
    """Wait for the answer; None when the client disconnected first."""
    answer = asyncio.wrap_future(future)
    gone = asyncio.create_task(_disconnected(request))
    either: set[asyncio.Future[Any]] = {answer, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _result(engine: Engine, rid: str, body: GenerateBody, answer: Answer) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(body.input_ids),
        "cached_tokens": answer.cached,
        "completion_tokens": len(answer.output_ids),
        "weight_version": engine.settings.weight_version,
    }
    if answer.dropped:
        meta["headrace"] = answer.dropped
    return {"text": "", "output_ids": list(answer.output_ids), "meta_info": meta}


async def _error(_request: Request, error: Exception) -> Response:
    status = 503 if isinstance(error, Unavailable) else 400
    return JSONResponse({"error": {"message": str(error)}}, status_code=status)
