"""What an engine hands its forwards to: the capture core, or what a measurement puts in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from headrace import __version__
from headrace_capture.config import CaptureConfig
from headrace_engine.faults.log import Hits
from headrace_engine.settings import EngineSettings

if TYPE_CHECKING:
    from headrace_capture.forward import Forward
    from headrace_engine.model import TargetModel


class Capturing(Protocol):
    """What an engine uses of a capture core; the methods are described there."""

    boot: str

    def forward(self, forward: Forward) -> dict[str, str]: ...

    def abort(self, rid: str) -> None: ...

    def counts(self) -> Any:
        """A dataclass, for /get_server_info."""

    def close(self, timeout: float) -> None: ...


# Called with the checksum of the checkpoint, once the model is loaded.
OpenCapture = Callable[[EngineSettings, CaptureConfig, "TargetModel", str, Hits], Capturing]


def open_capture(
    settings: EngineSettings, config: CaptureConfig, model: TargetModel, content: str, hits: Hits
) -> Capturing:
    """Open the capture core, over a folder that spoils dumps where a plan says so.

    Raises:
        UsageError: the dump folder cannot be used, or the buffer holds no row.
    """
    # Imported here because torch takes seconds, and the port answers before.
    from headrace_capture.core import Capture
    from headrace_capture.folder import Folder
    from headrace_engine.faults.files import SpoilingFolder

    return Capture(
        config,
        model=settings.name,
        fingerprint=f"headrace-engine {__version__} {settings.name} {content} {settings.dtype} tp1",
        weight_version=settings.weight_version,
        boundaries=model.boundaries,
        final_state=model.final_state,
        layers=model.layers,
        hidden_size=model.hidden_size,
        dtype=model.dtype,
        norm_weight=model.norm_weight,
        norm_eps=model.norm_eps,
        open_folder=partial(SpoilingFolder, hits=hits) if settings.faults else Folder,
    )
