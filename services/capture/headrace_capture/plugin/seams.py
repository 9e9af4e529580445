"""The places of SGLang that capture stands on, looked at before anything is hooked: SGLang only logs a missing one."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_STREAMER = f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
RUN_BATCH = f"{_SCHEDULER}.run_batch"
ABORT = f"{_SCHEDULER}.abort_request"
LOAD_MODEL = f"{_RUNNER}.load_model"
INIT_BACKENDS = f"{_RUNNER}.init_attention_backends"  # SGLang's own choice of layers is made in it, after the load
FORWARD = f"{_RUNNER}.forward"
LOGITS = f"{_SRT}.layers.logits_processor.LogitsProcessor.forward"
ANSWER_FIELD = f"{_STREAMER}.is_request_level_customized_info_key"
UPDATER = f"{_SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater"

# Whatever writes weights: the ways differ between versions, and so do the steps of one way.
_WRITES = re.compile(r"(update|load|begin|end)_.*weight.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A function of SGLang's by its dotted path, and the parameters that we read, in SGLang's order."""

    path: str
    parameters: tuple[str, ...] = ()


SEAMS = (
    Seam(path=RUN_BATCH, parameters=("self", "batch")),
    Seam(path=ABORT, parameters=("self", "recv_req")),
    Seam(path=LOAD_MODEL, parameters=("self",)),
    Seam(path=INIT_BACKENDS, parameters=("self",)),
    Seam(path=FORWARD, parameters=("self", "forward_batch")),
    Seam(
        path=LOGITS,
        parameters=(
            "self",
            "input_ids",
            "hidden_states",
            "lm_head",
            "logits_metadata",
            "aux_hidden_states",
            "hidden_states_before_norm",
        ),
    ),
    Seam(path=f"{UPDATER}.update_weights_from_disk"),
)
# Where SGLang has these, more can be done (see the session); their absence is no problem.
OPTIONAL = (Seam(path=ANSWER_FIELD, parameters=("self", "key")),)


def missing(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """What of the seams this SGLang does not have, each in a few words."""
    return [problem for seam in seams if (problem := _problem(seam))]


def weight_writers() -> tuple[str, ...]:
    """The paths of the functions by which a running server's weights change."""
    names = sorted(name for name in vars(resolve(UPDATER)) if _WRITES.fullmatch(name))
    return tuple(f"{UPDATER}.{name}" for name in names)


def resolve(path: str) -> Any:
    """The object of a dotted path: a class of a module, or a function of such a class.

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: it does not have what the path names.
    """
    parts = path.split(".")
    first = next(index for index, part in enumerate(parts) if part[0].isupper())  # as classes are written
    found: Any = importlib.import_module(".".join(parts[:first]))
    for name in parts[first:]:
        found = getattr(found, name)
    return found


def _problem(seam: Seam) -> str:
    try:
        found = resolve(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path} is not there ({error})"
    if not callable(found):
        return f"{seam.path} is no function"
    taken = tuple(inspect.signature(found).parameters)[: len(seam.parameters)]
    return "" if taken == seam.parameters else f"{seam.path} takes {list(taken)}, not {list(seam.parameters)}"
