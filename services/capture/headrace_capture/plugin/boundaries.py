"""Which layers a served model hands out: set by its own setter, and read back from what its forward looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from headrace.errors import UsageError

SETTER = "set_eagle3_layers_to_capture"
_LIST = "layers_to_capture"
_FLAG = "_is_layer_to_capture"
_SWITCH = "capture_aux_hidden_states"


def set_boundaries(model: Any, boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """Have the model hand out the residual stream that enters these layers, and return what it reads back.

    A model's setter has a numbering of its own: most add one to explicit ids, DeepSeek's only when the first is 1,
    GPT-OSS's unless the last is the layer count. So each way is tried, and what counts is what the model's forward
    will look at. Calling it again is harmless.

    Raises:
        UsageError: the model has no setter, or does not take the boundaries; it hands out none then.
    """
    setter: Callable[[list[int]], None] | None = getattr(model, SETTER, None)
    owner = capture_owner(model)
    if setter is None or owner is None:
        raise UsageError(
            f"{type(model).__name__} cannot hand out layers: it has no {SETTER}; "
            "take an SGLang that has it for this model, or serve another model"
        )
    check_reach(owner, boundaries)
    for ids in ([boundary - 1 for boundary in boundaries], list(boundaries)):
        _clear(owner)
        with suppress(ValueError, IndexError):  # a setter that refuses a numbering is not asked in it
            setter(ids)
        if read_boundaries(model) == boundaries:
            return boundaries
    _clear(owner)
    _put(owner, boundaries)
    found = read_boundaries(model)
    if found != boundaries:
        _clear(owner)
        for module in _inner(model):  # which would else take apart what its decoder does not hand out
            if getattr(module, _SWITCH, False):
                setattr(module, _SWITCH, False)
        raise UsageError(f"{type(model).__name__} hands out layers {list(found)} when asked for {list(boundaries)}")
    return found


def read_boundaries(model: Any) -> tuple[int, ...]:
    """The layers whose input the model's forward hands out, ascending; empty when it hands out none.

    Models of one kind look at a list, those of another at a flag of each layer: where both are there, they must say
    the same, else nothing is what it seems and the answer is empty.
    """
    owner = capture_owner(model)
    if owner is None:
        return ()
    listed: Sequence[int] = getattr(owner, _LIST, None) or ()
    named = tuple(sorted(int(layer) for layer in listed))
    flagged = tuple(index for index, layer in enumerate(_layers(owner)) if getattr(layer, _FLAG, False))
    return named if flagged == named or not (flagged or _uses_flags(owner)) else ()


def capture_owner(model: Any) -> Any:
    """The module that runs the decoder layers and knows which of them to hand out; None when there is none."""
    return next((module for module in _inner(model) if hasattr(module, _LIST) and hasattr(module, "layers")), None)


def check_reach(owner: Any, boundaries: tuple[int, ...]) -> None:
    """Raise UsageError for the boundaries that a model's forward may not hand out, whatever its setter takes.

    No model's loop passes boundary L on in every version: it is the final norm's input, which is captured as the
    final state. Boundary 0 comes before the first residual, with which some forwards add it.
    """
    layers = len(_layers(owner))
    if 0 in boundaries:
        raise UsageError(f"boundaries {list(boundaries)}: SGLang cannot hand out boundary 0, the embeddings; drop it")
    if layers and boundaries[-1] >= layers:
        raise UsageError(
            f"boundaries {list(boundaries)}: boundary {layers} is the final norm's input; drop it, and "
            "capture it as the final state (HEADRACE_CAPTURE_FINAL_STATE=pre_norm)"
        )


def _inner(model: Any) -> Iterator[Any]:
    """A model, what it wraps, and at last everything in it."""
    language = getattr(model, "language_model", model)  # of a model that also sees images
    for module in (language, model):
        yield getattr(module, "model", module)
        yield module
    yield from getattr(model, "modules", tuple)()


def _layers(owner: Any) -> Sequence[Any]:
    return getattr(owner, "layers", ())


def _uses_flags(owner: Any) -> bool:
    """Whether its own setter marks the layers, as those of the Qwen MoE models do."""
    return hasattr(owner, SETTER)


def _clear(owner: Any) -> None:
    """No layer is to be captured: the setters of the models with flags only ever add some."""
    setattr(owner, _LIST, [])
    for layer in _layers(owner):
        if hasattr(layer, _FLAG):
            delattr(layer, _FLAG)


def _put(owner: Any, boundaries: tuple[int, ...]) -> None:
    setattr(owner, _LIST, list(boundaries))
    if _uses_flags(owner):
        for boundary in boundaries:
            setattr(_layers(owner)[boundary], _FLAG, True)
