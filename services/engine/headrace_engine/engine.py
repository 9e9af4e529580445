"""One life of the engine: it loads the model, warms up, answers, and ends without losing what it captured."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from headrace import __version__, logs
from headrace.errors import HeadraceError, Unavailable, UsageError
from headrace_capture.config import CaptureConfig
from headrace_engine.capturing import Capturing, OpenCapture, open_capture
from headrace_engine.checkpoint import checksum, smollm2_checkpoint
from headrace_engine.faults.log import Hits
from headrace_engine.faults.plan import Fault
from headrace_engine.settings import SMOLLM2, EngineSettings
from headrace_engine.steps import Answer

if TYPE_CHECKING:
    from headrace_engine.model import TargetModel
    from headrace_engine.scheduler import Scheduler

_log = logs.get(__name__)
_RESERVED = 6  # SGLang accepts prompts up to the context length less 6
_WARM_UP_LENGTHS = (3, 48, 7)
_GRACE, _CLOSE = 2.0, 5.0  # seconds for requests in flight, and for the capture's last writes


class Engine:
    """The model, its scheduler and its capture; `on_failure` is called from a thread when any of them cannot go on."""

    def __init__(
        self,
        settings: EngineSettings,
        capture_config: CaptureConfig | None,
        on_failure: Callable[[], None],
        open_capture: OpenCapture = open_capture,
    ) -> None:
        self.settings = settings
        self.failure: HeadraceError | None = None
        self._hits = Hits(settings.faults)
        self._capture_config = capture_config
        self._on_failure = on_failure
        self._open_capture = open_capture
        self._model: TargetModel | None = None
        self._capture: Capturing | None = None
        self._scheduler: Scheduler | None = None
        self._ready = False
        self._stopping = Event()
        self._loader = Thread(target=self._load_or_fail, name="loader", daemon=True)

    def start(self) -> None:
        """Load the model and warm up in a thread of its own, so that the port can answer meanwhile."""
        self._loader.start()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._ready and not self._stopping.is_set()

    def submit(
        self,
        rid: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        extra_key: str = "",
        aborted: bool = False,
    ) -> Future[Answer]:
        """Check a prompt and queue it; with `aborted` it ends before it runs.

        Raises:
            UsageError: the prompt is empty, too long or holds ids that the model does not have; or the id is in flight.
            Unavailable: the engine starts or stops, or its queue is full.
        """
        scheduler = self._check(prompt)
        room = self.context_length - len(prompt) - 1
        new = min(max_new_tokens, room)
        return scheduler.submit(rid, prompt, new, ignore_eos=ignore_eos, extra_key=extra_key, aborted=aborted)

    def fault(self, rid: str, prompt: Sequence[int]) -> Fault | None:
        """How a request that is about to be submitted is to go wrong; None without a fault plan.

        Raises as `submit` does: what is refused anyway is hit by no fault.
        """
        if not self.settings.faults:
            return None
        self._check(prompt).check(rid)
        return self._hits.choose(rid, self._capture.boot if self._capture else "")

    def probe(self) -> Future[Answer]:
        """Queue a real forward of one token, as SGLang's /health_generate does."""
        return self.submit(f"HEALTH_CHECK_{uuid.uuid4().hex}", [0], 1)

    def abort(self, prefix: str) -> None:
        """Abort the requests whose id starts with `prefix`."""
        self._parts()[1].abort(prefix)

    def withdraw(self, rid: str) -> None:
        """Abort the one request whose client went away."""
        self._parts()[1].withdraw(rid)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output that a request may have."""
        model, _ = self._parts()
        return self.settings.context_length or model.context_length

    def info(self) -> dict[str, Any]:
        """What the engine tells about itself, in SGLang's words, and its capture's counts."""
        _, scheduler = self._parts()
        return {
            "version": f"headrace-engine {__version__}",
            "model_path": self.settings.name,
            "context_length": self.context_length,
            "max_req_input_len": self.context_length - _RESERVED,
            "chunked_prefill_size": self.settings.chunk_tokens,
            "max_running_requests": self.settings.max_running,
            "max_queued_requests": self.settings.max_queued,
            "dtype": self.settings.dtype,
            "weight_version": self.settings.weight_version,
            "disable_radix_cache": not self.settings.prefix_cache,
            "allow_auto_truncate": False,
            "speculative_algorithm": None,
            "speculative_draft_model_path": None,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "headrace": {
                "boot": self._capture.boot if self._capture else "",
                "capture": asdict(self._capture.counts()) if self._capture else None,
                "requests": scheduler.counts(),
            },
        }

    def drain(self) -> None:
        """Take no more requests; those in flight end by themselves or are aborted after a short grace."""
        self._stopping.set()
        if self._scheduler:
            self._scheduler.drain(_GRACE)

    def close(self) -> bool:
        """End everything within seconds; returns False when a thread of ours is stuck in native code."""
        self.drain()
        self._loader.join(_CLOSE)
        ended = not self._loader.is_alive()
        if self._scheduler:
            ended = self._scheduler.join(_GRACE + _CLOSE) and ended
        if self._capture:
            self._capture.close(_CLOSE)
        return ended

    def _check(self, prompt: Sequence[int]) -> Scheduler:
        """The scheduler, for a prompt that the model can take."""
        model, scheduler = self._parts()
        limit = self.context_length - _RESERVED
        if not prompt:
            raise UsageError("input_ids is empty")
        if len(prompt) > limit:
            raise UsageError(f"The input ({len(prompt)} tokens) is longer than the model's limit ({limit} tokens)")
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise UsageError(f"input_ids holds ids outside of 0 to {model.vocab_size - 1}")
        return scheduler

    def _parts(self) -> tuple[TargetModel, Scheduler]:
        if self._model is None or self._scheduler is None or not self.ready:
            raise Unavailable("the engine stops" if self._stopping.is_set() else "the model loads; try again later")
        return self._model, self._scheduler

    def _fail(self, error: Exception) -> None:
        self.failure = error if isinstance(error, HeadraceError) else Unavailable(f"{type(error).__name__}: {error}")
        self._on_failure()

    def _load_or_fail(self) -> None:
        try:
            self._load()
        except HeadraceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a thread that dies silently leaves /health at 503 for ever
            _log.exception("the engine cannot start")
            self._fail(error)

    def _load(self) -> None:
        # Imported here because torch and transformers take seconds, and the port answers before.
        import torch

        from headrace_engine.faults.forwards import Forwards
        from headrace_engine.model import TargetModel, quiet
        from headrace_engine.scheduler import Scheduler

        settings = self.settings
        quiet()
        torch.set_num_threads(settings.threads)
        folder = smollm2_checkpoint() if settings.model == SMOLLM2 else Path(settings.model)
        model = TargetModel(
            folder, boundaries=settings.boundaries, final_state=settings.final_state, dtype=settings.dtype
        )
        if (settings.context_length or 0) > model.context_length:
            raise UsageError(
                f"option --context-length {settings.context_length}: the model's own is {model.context_length}"
            )
        if self._capture_config:
            self._capture = self._open_capture(settings, self._capture_config, model, checksum(folder), self._hits)
        scheduler = Scheduler(
            model,
            self._capture,
            chunk_tokens=settings.chunk_tokens,
            max_running=settings.max_running,
            max_queued=settings.max_queued,
            weight_version=settings.weight_version,
            on_failure=self._fail,
            prefix_cache=settings.prefix_cache,
            faults=Forwards(self._hits, self._stopping) if settings.faults else None,
        )
        self._model, self._scheduler = model, scheduler
        scheduler.start()
        if self._stopping.is_set():  # drained before there was a scheduler
            scheduler.drain(0.0)
            return
        self._warm_up(model, scheduler)
        self._stopping.wait(self._hits.plan.starting_seconds)
        self._ready = True
        _log.info(
            "ready", model=settings.name, boundaries=list(model.boundaries), final_state=model.final_state,
            capture=self._capture is not None, threads=settings.threads,
        )  # fmt: skip

    def _warm_up(self, model: TargetModel, scheduler: Scheduler) -> None:
        """Run real forwards under ids that are not ours, as SGLang does: they must not be captured."""
        for length in _WARM_UP_LENGTHS:
            prompt = [token % model.vocab_size for token in range(length)]
            scheduler.submit(uuid.uuid4().hex, prompt, 2).result()
