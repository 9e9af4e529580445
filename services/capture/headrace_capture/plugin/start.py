"""Registers the hooks, if the environment asks for capture and this SGLang has every place that they stand on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, UsageError
from headrace_capture.config import DUMP_DIR
from headrace_capture.plugin import seams
from headrace_capture.plugin.settings import PluginSettings

if TYPE_CHECKING:  # they need torch, which most of SGLang's processes would load for nothing
    from headrace_capture.plugin.facts import Server
    from headrace_capture.plugin.session import Session

logger = logging.getLogger("headrace.capture")

Hook = tuple[str, Callable[..., Any], str]  # target, hook, kind

_LOGITS_ARGUMENTS = (("hidden_states", 2), ("aux_hidden_states", 5), ("hidden_states_before_norm", 6))


def register() -> None:
    """SGLang's entry point, called in each of its processes; does nothing without HEADRACE_DUMP_DIR. Never raises."""
    if dump_dir := os.environ.get(DUMP_DIR):
        _or_refuse(_start, Path(dump_dir))


def _start() -> None:
    settings = PluginSettings.from_environ(os.environ)
    if settings is None:
        return
    if lacking := seams.missing():
        raise UsageError(f"this SGLang lacks what capture stands on: {'; '.join(lacking)}")
    _register(settings)


def _register(settings: PluginSettings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    from headrace_capture.plugin.facts import read_server
    from headrace_capture.plugin.session import Session

    absent = {seam.path for seam in seams.OPTIONAL if seams.missing((seam,))}
    for target, hook, kind in hooks(Session(settings), read_server, seams.weight_writers()):
        if target not in absent:
            HookRegistry.register(target, hook, HookType[kind])


def hooks(session: Session, read: Callable[[Any], Server], writers: Sequence[str]) -> list[Hook]:
    """The hooks as SGLang calls them; what they mean is the session's. None of them ever raises.

    `read` tells of the server of a model runner, `writers` are the functions by which weights change.
    """

    def load_model(result: Any, runner: Any, *_: Any, **__: Any) -> None:
        if not runner.is_draft_worker:
            _or_refuse(lambda: session.model_loaded(runner, read(runner)), session.dump_dir, session.close)

    def init_backends(result: Any, runner: Any, *_: Any, **__: Any) -> None:
        _or_refuse(lambda: session.model_ready(runner), session.dump_dir, session.close)

    def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            session.batch_begins(batch)
        except Exception:
            logger.exception("a batch begins")
        try:
            return original(scheduler, batch, *args, **kwargs)
        finally:
            session.batch_ends()

    def forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        session.forward_begins()
        result = original(runner, forward_batch, *args, **kwargs)
        session.forward_ended(runner, forward_batch, getattr(result, "logits_output", None))
        return result

    def logits(*args: Any, **kwargs: Any) -> None:
        # Whatever a model calls it with is its own affair: nothing may be missing to us alone.
        hidden_states, aux_hidden_states, before_norm = (
            args[place] if len(args) > place else kwargs.get(name) for name, place in _LOGITS_ARGUMENTS
        )
        session.logits_input(hidden_states, aux_hidden_states, before_norm)

    def abort(result: Any, scheduler: Any, recv_req: Any, *_: Any, **__: Any) -> None:
        try:
            session.aborted(recv_req)
        except Exception:
            logger.exception("an abort")

    def answer_field(result: Any, streamer: Any, key: Any, *_: Any, **__: Any) -> bool | None:
        return session.is_of_a_request(key) or None  # None leaves the result as it is

    def write_weights(*_: Any, **__: Any) -> None:
        session.weights_change()

    return [
        (seams.LOAD_MODEL, load_model, "AFTER"),
        (seams.INIT_BACKENDS, init_backends, "AFTER"),
        (seams.RUN_BATCH, run_batch, "AROUND"),
        (seams.FORWARD, forward, "AROUND"),
        (seams.LOGITS, logits, "BEFORE"),
        (seams.ABORT, abort, "AFTER"),
        (seams.ANSWER_FIELD, answer_field, "AFTER"),
        *((path, write_weights, "BEFORE") for path in writers),
    ]


def _or_refuse(step: Callable[[], None], dump_dir: Path, undo: Callable[[], None] = lambda: None) -> None:
    """Take a step without which nothing is captured; the server goes on either way."""
    try:
        step()
    except HeadraceError as error:
        undo()
        _refuse(dump_dir, str(error))
    except Exception as error:
        logger.exception("preparing capture")
        undo()
        _refuse(dump_dir, f"preparing capture: {type(error).__name__}: {error}")


def _refuse(dump_dir: Path, problem: str) -> None:
    from headrace_capture.plugin.refusal import refuse  # it locks the folder: only where there is something to say

    refuse(dump_dir, problem)
