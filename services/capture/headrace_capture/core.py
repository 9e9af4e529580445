"""The capture core: takes an engine's forwards and publishes one dump per request, beside the engine's own work."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from headrace.capturestats import CaptureStats
from headrace.errors import UsageError
from headrace.ids import NONCE_ALPHABET
from headrace.reasons import Reason
from headrace_capture.assembly import Assembly, Loss, Place
from headrace_capture.batching import batches
from headrace_capture.config import CaptureConfig
from headrace_capture.copiers import copier, try_copier
from headrace_capture.declaration import declare
from headrace_capture.folder import Folder
from headrace_capture.forward import Forward, Piece
from headrace_capture.meter import Meter
from headrace_capture.publisher import Counts, Filled, Publisher
from headrace_capture.ring import Ring
from headrace_capture.room import Room
from headrace_capture.rows import Memory, Rows, RowShape
from headrace_capture.upkeep import Upkeep

__all__ = ["Capture", "Counts"]

logger = logging.getLogger("headrace.capture")

_BOOT_LENGTH = 12
_SLOTS_PER_RING = 6  # a slot is at most this part of the ring: earlier ones are written while later ones fill
_LOOK_EVERY = 0.5  # seconds
_EXIT_SECONDS = 5.0  # for the last writes when the interpreter ends


class Capture:
    """Captures the forwards of one engine process into its dump folder.

    `boundaries` are ascending and read back from the model, `final_state` is `pre_norm` or `post_norm`, `layers` the
    model's layer count, `norm_weight` [D] and `norm_eps` those of its final norm where they can be had; `device` is
    where the states will lie (`cuda` means the current one); `forward_rows` the most rows that a forward of the engine
    has, by which the buffer is sized unless the configuration does. `open_folder` opens the dump folder for a boot.

    On a GPU it takes, once and here, a third of the buffer's bytes in device memory and tries a copy.

    Raises:
        UsageError: the folder cannot be used, the memory cannot be had or holds no row, the device does not copy as
            it should, or an argument contradicts the others.
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
        forward_rows: int | None = None,
        open_folder: Callable[[Path, str], Folder] = Folder,
    ) -> None:
        self.boot = "".join(secrets.choice(NONCE_ALPHABET) for _ in range(_BOOT_LENGTH))
        declaration = declare(
            self.boot,
            model=model,
            fingerprint=fingerprint,
            weight_version=weight_version,
            boundaries=boundaries,
            final_state=final_state,
            layers=layers,
            hidden_size=hidden_size,
            dtype=dtype,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
        )
        self._config = config
        self._device = _indexed(device)
        self._shape = RowShape(boundaries=len(declaration.facts.boundaries), hidden_size=hidden_size, dtype=dtype)
        self._buffer_bytes = config.buffer_for(self._shape.row_bytes, forward_rows)
        if self._buffer_bytes < self._shape.nbytes(1):
            raise UsageError(
                f"a capture buffer of {self._buffer_bytes} bytes does not hold a row of {self._shape.nbytes(1)}; "
                "raise HEADRACE_CAPTURE_BUFFER_BYTES to about four forwards"
            )
        self._max_rows = max(1, self._shape.fitting(self._buffer_bytes // _SLOTS_PER_RING))
        self._assembly = Assembly(deadline=config.deadline_seconds, remember=config.remember)
        self._meter = Meter()
        self._ignored = 0
        self._stumble = ""
        self._turn = threading.Lock()  # a forward at a time, and none while the capture ends
        self._closed = threading.Event()
        with ExitStack() as undo:
            self._folder = open_folder(config.dump_dir, self.boot)
            undo.callback(self._folder.close)
            self._copier = copier(self._shape, self._device, self._max_rows)
            self._ring = Ring(self._buffer_bytes, device=self._device if self._device.type == "cuda" else None)
            undo.callback(self._ring.close)
            self._memory = Memory(self._shape, self._ring.tensor)
            try_copier(self._copier, self._shape, self._memory, self._device, self._max_rows)
            try:
                self._room = Room(self._folder.free_bytes)
                self._publisher = Publisher(
                    self._folder,
                    self._room,
                    declaration.facts,
                    self._shape,
                    self._ring,
                    writers=config.writers,
                    conclude=self._assembly.conclude,
                    enter_thread=self._copier.enter_thread,
                )
                undo.callback(self._publisher.end)
                for name, data in declaration.files.items():
                    self._folder.put(name, data, replace=True)
                self._upkeep = Upkeep(
                    self._folder,
                    self._room,
                    cards=declaration.files,
                    interval=min(_LOOK_EVERY, config.deadline_seconds / 4),
                    expire=self._expire,
                    stats=self.stats,
                    report=self._report,
                )
            except OSError as error:
                raise UsageError(f"dump folder {config.dump_dir}: the engine cannot declare itself: {error}") from error
            except RuntimeError as error:
                raise UsageError(f"the capture's threads cannot be started: {error}") from error
            undo.pop_all()
        # Threads that are cut off inside torch would end the interpreter with an abort.
        atexit.register(self._at_exit, os.getpid())

    def forward(self, forward: Forward) -> dict[str, str]:
        """Capture a forward's rows of ours; called in the scheduler's thread.

        The caller may overwrite its tensors when this returns (on a GPU: by work on its current stream). It never
        raises. It reads and writes no file, asks no filesystem, and on a GPU waits for nothing that the device does.
        It waits for room in the buffer at most `max_wait_seconds` in all, and after a wait in which no writer got
        anywhere not at all, until one does.

        Returns:
            Request id to `dropped:<reason>`, for each request that this forward found to be lost.
        """
        dropped: dict[str, str] = {}
        if self._closed.is_set():
            return dropped
        began = time.perf_counter()
        with self._turn:
            if not self._closed.is_set() and self._capture(forward, dropped):
                self._meter.add(time.perf_counter() - began)
        return dropped

    def refuse(self, pieces: Sequence[Piece], detail: str) -> dict[str, str]:
        """A forward with these pieces gave no states that can be used: what is ours of it is lost as `internal`.

        Never raises; returns what `forward` does.
        """
        dropped: dict[str, str] = {}
        try:
            with self._publisher.lock:
                self._lose(self._assembly.refuse(pieces, detail), dropped)
        except Exception:  # noqa: BLE001 - the engine must survive whatever goes wrong here
            self._stumble = f"refusing a forward\n{traceback.format_exc()}"
        return dropped

    def abort(self, rid: str) -> None:
        """The engine aborted the request: what is half assembled of it is lost as `aborted`. Never raises."""
        try:
            with self._publisher.lock:
                loss = self._assembly.abort(rid, "the engine aborted the request")
                self._lose([loss] if loss else [], {})
        except Exception:  # noqa: BLE001 - the engine must survive whatever goes wrong here
            self._stumble = f"aborting a request\n{traceback.format_exc()}"

    def counts(self) -> Counts:
        """What became of the requests since the boot."""
        with self._publisher.lock:
            return self._publisher.counts(ignored=self._ignored, half_assembled=self._assembly.half_assembled)

    def stats(self) -> CaptureStats:
        """What the capture did and cost since the boot."""
        counts = self.counts()
        median, high, most = (round(1e3 * seconds, 3) for seconds in self._meter.quantiles())
        return CaptureStats(
            boot=self.boot,
            published=counts.published,
            published_bytes=counts.published_bytes,
            lost=counts.lost,
            ignored=counts.ignored,
            half_assembled=counts.half_assembled,
            forwards=self._meter.forwards,
            forward_ms_p50=median,
            forward_ms_p99=high,
            forward_ms_max=most,
            waited_ms=round(1e3 * self._meter.waited, 3),
            buffer_bytes=counts.buffer_bytes,
            ring_bytes=self._ring.capacity,
            pinned_bytes=self._ring.pinned_bytes,
            device_bytes=self._copier.device_bytes,
        )

    def flush(self, timeout: float) -> bool:
        """Wait for the writer threads; False when they still work after `timeout` seconds."""
        return self._publisher.flush(time.monotonic() + timeout)

    def close(self, timeout: float) -> None:
        """End within `timeout` seconds: what is queued is written, what is half assembled is lost as `aborted`."""
        deadline = time.monotonic() + timeout
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self._at_exit)
        turned = self._turn.acquire(timeout=max(0.0, timeout))
        if turned:  # the forward that was under way has ended, and none begins
            self._turn.release()
        with self._publisher.lock:
            self._lose(self._assembly.abort_all("the engine ended"), {})
        self._publisher.end()
        ended = self._publisher.join(deadline) and turned
        if self._upkeep.stop(deadline) and ended and self._copier.idle(deadline):
            self._upkeep.write_stats()
            self._report()
            self._folder.close()  # who still works needs it, and the buffer
            self._ring.close()

    def _capture(self, forward: Forward, dropped: dict[str, str]) -> bool:
        """Capture what is ours; whether there was any."""
        places: tuple[Place, ...] = ()
        try:
            with self._publisher.lock:
                problem = self._shape.problem(forward, self._device)
                if problem is not None:
                    self._lose(self._assembly.refuse(forward.pieces, problem), dropped)
                    return bool(dropped)
                plan = self._assembly.plan(forward.pieces, forward.weight_version, time.monotonic())
                places = plan.places
                self._ignored += plan.ignored
                self._lose(plan.losses, dropped)
                self._lose(self._publisher.open(places, forward.weight_version), dropped)
            if places:
                with torch.no_grad():
                    self._copy(forward, places, dropped)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._fail(places, Reason.NO_ROOM, f"no memory to gather the rows: {error}", dropped)
        except Exception as error:  # noqa: BLE001 - the engine must survive whatever goes wrong here
            self._stumble = f"capturing a forward\n{traceback.format_exc()}"
            detail = f"capturing a forward: {type(error).__name__}: {error}"
            self._fail(places, Reason.INTERNAL, detail, dropped)
            with suppress(Exception), self._publisher.lock:  # the forward itself may be what is wrong
                self._lose(self._assembly.refuse(forward.pieces, detail), dropped)
        return bool(places or dropped)

    def _copy(self, forward: Forward, places: tuple[Place, ...], dropped: dict[str, str]) -> None:
        deadline = time.monotonic() + self._config.max_wait_seconds
        is_open = self._publisher.is_open
        for batch in batches((place for place in places if is_open(place.request)), self._max_rows):
            wanted = [cut for cut in batch.cuts if is_open(cut.place.request)]
            if not wanted:
                continue
            began = time.perf_counter()
            slot = self._ring.acquire(self._shape.nbytes(batch.rows), len(wanted), deadline)
            self._meter.waited += time.perf_counter() - began
            if slot is None:
                waited = f"the capture buffer of {self._buffer_bytes} bytes had no room"
                self._fail((cut.place for cut in wanted), Reason.NO_ROOM, waited, dropped)
                continue
            rows = Rows(self._memory, slot.begin, batch.rows)
            try:
                arrived = self._copier.copy(forward, batch, rows)
            except BaseException:
                self._ring.release(slot, len(wanted))
                raise
            self._publisher.write(wanted, Filled(batch=batch, slot=slot, rows=rows, arrived=arrived))

    def _lose(self, losses: Iterable[Loss], dropped: dict[str, str]) -> None:
        for loss in losses:
            self._publisher.lose(loss)
            dropped[loss.request] = f"dropped:{loss.reason}"

    def _fail(self, places: Iterable[Place], reason: Reason, detail: str, dropped: dict[str, str]) -> None:
        for place in places:
            if self._publisher.fail(Loss(request=place.request, reason=reason, detail=detail)):
                dropped[place.request] = f"dropped:{reason}"

    def _expire(self) -> None:
        with self._publisher.lock:
            self._lose(self._assembly.expire(time.monotonic()), {})

    def _report(self) -> None:
        stumble, self._stumble = self._stumble, ""
        if stumble:
            logger.error("%s", stumble)
        self._publisher.report()

    def _at_exit(self, process: int) -> None:
        if process == os.getpid():  # and not in a process that was forked off: the threads are not there
            self.close(_EXIT_SECONDS)


def _indexed(name: torch.device | str) -> torch.device:
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
