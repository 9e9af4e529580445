"""The capture core: takes an engine's forwards and publishes one dump per request, beside the engine's own work."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch

from headrace.boundaries import resolve_boundaries
from headrace.dumps import ENGINE_FILE, POST_NORM, PRE_NORM, EngineCard, encode_json
from headrace.errors import UsageError
from headrace.finalnorm import FinalNorm, norm_file, with_norm
from headrace.ids import NONCE_ALPHABET
from headrace.reasons import Reason
from headrace_capture.assembly import Assembly, Loss, Place
from headrace_capture.batching import batches
from headrace_capture.config import CaptureConfig
from headrace_capture.dumpfile import EngineFacts
from headrace_capture.folder import Folder
from headrace_capture.forward import Forward
from headrace_capture.publisher import Counts, Filled, Publisher
from headrace_capture.ring import Ring
from headrace_capture.rows import DTYPES, RowShape, copier

__all__ = ["Capture", "Counts"]

logger = logging.getLogger("headrace.capture")

_BOOT_LENGTH = 12
_SLOTS_PER_RING = 8  # a slot is at most this part of the ring: earlier ones are written while later ones fill


class Capture:
    """Captures the forwards of one engine process into its dump folder.

    `boundaries` are ascending and read back from the model, `final_state` is `pre_norm` or `post_norm`, `layers` the
    model's layer count, `norm_weight` [D] and `norm_eps` those of its final norm where they can be had; `device` is
    where the states will lie. `open_folder` opens the dump folder for a boot.

    Raises:
        UsageError: the folder cannot be used, the buffer cannot be had or holds no row, or an argument contradicts
            the others.
    """

    def __init__(
        self,
        config: CaptureConfig,
        *,
        model: str,
        fingerprint: str,
        weight_version: str,
        boundaries: tuple[int, ...],
        final_state: str,
        layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 0.0,
        device: torch.device | str = "cpu",
        open_folder: Callable[[Path, str], Folder] = Folder,
    ) -> None:
        if dtype not in DTYPES:
            raise UsageError(f"states of {dtype} cannot be captured; serve the model in bfloat16, float16 or float32")
        if final_state not in (PRE_NORM, POST_NORM):
            raise UsageError(f"final state {final_state!r}: it is {PRE_NORM} or {POST_NORM}")
        boundaries = resolve_boundaries(boundaries, layers)
        self._shape = RowShape(boundaries=len(boundaries), hidden_size=hidden_size, dtype=dtype)
        if config.buffer_bytes < self._shape.row_bytes:
            raise UsageError(
                f"a capture buffer of {config.buffer_bytes} bytes does not hold a row of {self._shape.row_bytes}; "
                "raise HEADRACE_CAPTURE_BUFFER_BYTES to about two forwards"
            )
        self._max_rows = max(1, config.buffer_bytes // _SLOTS_PER_RING // self._shape.row_bytes)
        self._config = config
        self._device = torch.device(device)
        self.boot = "".join(secrets.choice(NONCE_ALPHABET) for _ in range(_BOOT_LENGTH))
        self._copier = copier(self._shape, self._device)
        self._folder = open_folder(config.dump_dir, self.boot)
        try:
            norm = None if norm_weight is None else self._put_norm(norm_weight, norm_eps)
            # In each dump, too: a row is made with the norm of the boot that its dump is of, and with no other.
            fingerprint = with_norm(fingerprint, norm)
            card = EngineCard(
                boot=self.boot,
                model=model,
                fingerprint=fingerprint,
                weight_version=weight_version,
                boundaries=boundaries,
                final_state=final_state,
                layers=layers,
                hidden_size=hidden_size,
                dtype=DTYPES[dtype],
                norm_file="" if norm is None else norm_file(self.boot),
            )
            self._ring = Ring(config.buffer_bytes, pinned=self._device.type == "cuda")
            self._folder.put(ENGINE_FILE, encode_json(card), replace=True)
        except OSError as error:
            self._folder.close()
            raise UsageError(f"dump folder {config.dump_dir}: the engine cannot declare itself: {error}") from error
        except UsageError:
            self._folder.close()
            raise
        self._assembly = Assembly(deadline=config.deadline_seconds, remember=config.remember)
        self._publisher = Publisher(
            self._folder,
            EngineFacts(
                model=model,
                fingerprint=fingerprint,
                boundaries=boundaries,
                final_state=final_state,
                hidden_size=hidden_size,
                dtype=dtype,
            ),
            self._shape,
            self._ring,
            writers=config.writers,
            conclude=self._assembly.conclude,
        )
        self._ignored = 0
        self._closed = threading.Event()
        self._timer = threading.Thread(target=self._watch_deadlines, name="headrace-capture-deadlines", daemon=True)
        self._timer.start()

    def forward(self, forward: Forward) -> dict[str, str]:
        """Capture a forward's rows of ours; called in the scheduler's thread.

        The caller may overwrite its tensors when this returns (on a GPU: by work on its current stream). It never
        raises, and waits for room in the buffer at most `max_wait_seconds` in all.

        Returns:
            Request id to `dropped:<reason>`, for each request that this forward found to be lost.
        """
        dropped: dict[str, str] = {}
        if self._closed.is_set():
            return dropped
        places: tuple[Place, ...] = ()
        try:
            with self._publisher.lock:
                problem = self._shape.problem(forward, self._device)
                if problem is not None:
                    self._lose(self._assembly.refuse(forward.pieces, problem), dropped)
                    return dropped
                plan = self._assembly.plan(forward.pieces, forward.weight_version, time.monotonic())
                places = plan.places
                self._ignored += plan.ignored
                self._lose(plan.losses, dropped)
                self._lose(self._publisher.open(places, forward.weight_version), dropped)
            if places:
                self._copy(forward, places, dropped)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._fail(places, Reason.NO_ROOM, f"no memory to gather the rows: {error}", dropped)
        except Exception as error:  # the engine must survive whatever goes wrong here
            logger.exception("capturing a forward")
            detail = f"capturing a forward: {type(error).__name__}: {error}"
            self._fail(places, Reason.INTERNAL, detail, dropped)
            with suppress(Exception), self._publisher.lock:  # the forward itself may be what is wrong
                self._lose(self._assembly.refuse(forward.pieces, detail), dropped)
        return dropped

    def abort(self, rid: str) -> None:
        """The engine aborted the request: what is half assembled of it is lost as `aborted`. Never raises."""
        try:
            with self._publisher.lock:
                loss = self._assembly.abort(rid, "the engine aborted the request")
                self._lose([loss] if loss else [], {})
        except Exception:  # the engine must survive whatever goes wrong here
            logger.exception("aborting a request")

    def counts(self) -> Counts:
        """What became of the requests since the boot."""
        with self._publisher.lock:
            return self._publisher.counts(ignored=self._ignored, half_assembled=self._assembly.half_assembled)

    def flush(self, timeout: float) -> bool:
        """Wait for the writer threads; False when they still work after `timeout` seconds."""
        return self._publisher.flush(time.monotonic() + timeout)

    def close(self, timeout: float) -> None:
        """End within `timeout` seconds: what is queued is written, what is half assembled is lost as `aborted`."""
        deadline = time.monotonic() + timeout
        if self._closed.is_set():
            return
        self._closed.set()
        with self._publisher.lock:
            self._lose(self._assembly.abort_all("the engine ended"), {})
        self._timer.join(max(0.0, deadline - time.monotonic()))
        if self._publisher.stop(deadline):  # a thread that still works needs both
            self._folder.close()
            self._ring.close()

    def _copy(self, forward: Forward, places: tuple[Place, ...], dropped: dict[str, str]) -> None:
        deadline = time.monotonic() + self._config.max_wait_seconds
        work = batches((place for place in places if self._publisher.is_open(place.request)), self._max_rows)
        for batch, staged in zip(work, self._copier.stage(forward, work), strict=True):
            wanted = [cut for cut in batch.cuts if self._publisher.is_open(cut.place.request)]
            if not wanted:
                continue
            slot = self._ring.acquire(batch.rows * self._shape.row_bytes, len(wanted), deadline)
            if slot is None:
                waited = f"the capture buffer of {self._config.buffer_bytes} bytes had no room"
                self._fail((cut.place for cut in wanted), Reason.NO_ROOM, waited, dropped)
                continue
            views = self._shape.views(slot, batch.rows)
            try:
                arrived = self._copier.copy(staged, views)
            except BaseException:
                for _ in wanted:
                    self._ring.release(slot)
                raise
            filled = Filled(batch=batch, slot=slot, views=views, arrived=arrived)
            for cut in wanted:
                self._publisher.write(cut, filled)

    def _lose(self, losses: Iterable[Loss], dropped: dict[str, str]) -> None:
        for loss in losses:
            self._publisher.lose(loss)
            dropped[loss.request] = f"dropped:{loss.reason}"

    def _fail(self, places: Iterable[Place], reason: Reason, detail: str, dropped: dict[str, str]) -> None:
        for place in places:
            if self._publisher.fail(Loss(request=place.request, reason=reason, detail=detail)):
                dropped[place.request] = f"dropped:{reason}"

    def _watch_deadlines(self) -> None:
        interval = min(1.0, self._config.deadline_seconds / 4)
        while not self._closed.wait(interval):
            try:
                with self._publisher.lock:
                    self._lose(self._assembly.expire(time.monotonic()), {})
            except Exception:  # without this thread, requests would stay half assembled for ever
                logger.exception("ending requests past their deadline")

    def _put_norm(self, weight: torch.Tensor, eps: float) -> FinalNorm:
        """Publish the final norm's weight [D] as a safetensors file with `eps` in its metadata."""
        values = weight.detach().to("cpu").contiguous()
        if values.dtype not in DTYPES or tuple(values.shape) != (self._shape.hidden_size,):
            raise UsageError(
                f"the final norm's weight is {values.dtype} {list(values.shape)}, expected [{self._shape.hidden_size}]"
            )
        norm = FinalNorm(
            dtype=DTYPES[values.dtype],
            hidden_size=self._shape.hidden_size,
            weight=bytes(values.view(torch.uint8).tolist()),
            eps=eps,
        )
        self._folder.put(norm_file(self.boot), norm.encode(), replace=True)
        return norm
