"""What a user may choose of the plugin, from the environment of the server's processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.boundaries import EAGLE3, check_ascending
from headrace.dumps import POST_NORM, PRE_NORM
from headrace.errors import UsageError
from headrace_capture.config import CaptureConfig

BOUNDARIES = "HEADRACE_CAPTURE_BOUNDARIES"
FINAL_STATE = "HEADRACE_CAPTURE_FINAL_STATE"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """How the plugin captures.

    `boundaries` is `eagle3` or an ascending list. `final_state` is `pre_norm`, `post_norm`, or empty for pre-norm
    where the model's final norm can be found.
    """

    capture: CaptureConfig
    boundaries: str | tuple[int, ...] = EAGLE3
    final_state: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PluginSettings | None:
        """Read the settings; None without HEADRACE_DUMP_DIR, and then nothing may be captured.

        Raises:
            UsageError: a variable does not parse or is out of range.
        """
        capture = CaptureConfig.from_environ(environ)
        if capture is None:
            return None
        final_state = environ.get(FINAL_STATE, "")
        if final_state not in ("", PRE_NORM, POST_NORM):
            raise UsageError(f"{FINAL_STATE}={final_state!r}: write {PRE_NORM} or {POST_NORM}, or leave it out")
        boundaries = _boundaries(environ.get(BOUNDARIES, "") or EAGLE3)
        return cls(capture=capture, boundaries=boundaries, final_state=final_state)


def _boundaries(text: str) -> str | tuple[int, ...]:
    if text == EAGLE3:
        return EAGLE3
    try:
        numbers = tuple(int(part) for part in text.split(","))
        check_ascending(numbers)
    except (ValueError, UsageError) as error:
        raise UsageError(
            f"{BOUNDARIES}={text!r}: write {EAGLE3}, or ascending layer numbers such as 2,16,29"
        ) from error
    return numbers
