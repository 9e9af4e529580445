from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headrace.errors import UsageError
from headrace_capture.plugin.boundaries import read_boundaries, set_boundaries

LAYERS = 12


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        self.layers_to_capture: list[int] = []


class MarkingDecoder(Decoder):
    """As Qwen's MoE models: each layer carries a flag, which the decoder's own setter only ever adds."""

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.layers_to_capture = layers
        for layer in layers:
            self.layers[layer]._is_layer_to_capture = True  # type: ignore[assignment]


class Model(nn.Module):
    """As Llama: explicit ids name outputs."""

    def __init__(self, decoder: Decoder | None = None) -> None:
        super().__init__()
        self.model = decoder or Decoder()
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, ids: list[int] | None = None) -> None:
        self.capture_aux_hidden_states = True
        self.put([2, LAYERS // 2, LAYERS - 3] if ids is None else self.numbered(ids))

    def numbered(self, ids: list[int]) -> list[int]:
        return [i + 1 for i in ids]

    def put(self, layers: list[int]) -> None:
        self.model.layers_to_capture = layers


class MarkingModel(Model):
    def __init__(self) -> None:
        super().__init__(MarkingDecoder())

    def put(self, layers: list[int]) -> None:
        self.model.set_eagle3_layers_to_capture(layers)  # type: ignore[operator]


class Marking(Model):
    """As MiniMax: marks the layers of a decoder that has no setter itself."""

    def put(self, layers: list[int]) -> None:
        super().put(layers)
        for layer in layers:
            self.model.layers[layer]._is_layer_to_capture = True  # type: ignore[assignment]


class DeepSeek(Model):
    """Adds one only where the first id is 1."""

    def numbered(self, ids: list[int]) -> list[int]:
        return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


class GptOss(Model):
    """Adds one unless the last id is the number of layers."""

    def numbered(self, ids: list[int]) -> list[int]:
        return list(ids) if max(ids) == LAYERS else [i + 1 for i in ids]


class Strict(Model):
    """Refuses what it does not number so."""

    def numbered(self, ids: list[int]) -> list[int]:
        if ids[0] % 2:
            raise ValueError("odd")
        return list(ids)


class Wrapper(nn.Module):
    """As Kimi: sees images, and has a language model that does the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = DeepSeek()

    def set_eagle3_layers_to_capture(self, ids: list[int] | None = None) -> None:
        self.language_model.set_eagle3_layers_to_capture(ids)


FAMILIES = [Model, MarkingModel, Marking, DeepSeek, GptOss, Strict, Wrapper]
Lists = st.lists(st.integers(1, LAYERS - 1), min_size=1, unique=True).map(sorted)


def captured(model: Any) -> list[int]:
    """The layers that a forward would keep the input of."""
    inner = getattr(model, "language_model", model)
    if not inner.capture_aux_hidden_states:
        return []
    if isinstance(inner, MarkingModel | Marking):
        return [i for i, layer in enumerate(inner.model.layers) if getattr(layer, "_is_layer_to_capture", False)]
    return sorted(inner.model.layers_to_capture)


@pytest.mark.parametrize("family", FAMILIES)
@given(wanted=Lists, default=st.booleans())
def test_every_numbering_is_led_to_the_boundaries_that_are_wanted(
    family: Callable[[], Any], wanted: list[int], default: bool
) -> None:
    model = family()
    if default:  # what SGLang's own flag does before
        getattr(model, "language_model", model).put([2, 6, 9])
        getattr(model, "language_model", model).capture_aux_hidden_states = True
    assert set_boundaries(model, tuple(wanted)) == tuple(wanted) == read_boundaries(model)
    assert captured(model) == wanted


@pytest.mark.parametrize("family", [Model, MarkingModel, Marking, Wrapper])
def test_other_boundaries_take_the_place_of_earlier_ones(family: Callable[[], Any]) -> None:
    model = family()
    set_boundaries(model, (1, 2, 3))
    set_boundaries(model, (5, 9))
    assert captured(model) == [5, 9]


@pytest.mark.parametrize("family", [MarkingModel, Marking])
def test_flags_that_say_another_thing_than_the_list_are_no_answer(family: Callable[[], Any]) -> None:
    model = family()
    set_boundaries(model, (3,))
    model.model.layers[7]._is_layer_to_capture = True
    assert read_boundaries(model) == ()


@pytest.mark.parametrize(("wanted", "word"), [((0, 4), "embeddings"), ((4, LAYERS), "final norm's input")])
def test_what_no_forward_hands_out_is_refused_with_the_reason(wanted: tuple[int, ...], word: str) -> None:
    model = Model()
    with pytest.raises(UsageError, match=word):
        set_boundaries(model, wanted)
    assert captured(model) == []


def test_a_model_without_a_setter_or_a_decoder_is_refused() -> None:
    for model in (nn.Module(), SimpleNamespace(set_eagle3_layers_to_capture=lambda ids: None)):
        with pytest.raises(UsageError, match="cannot hand out layers"):
            set_boundaries(model, (2,))
        assert read_boundaries(model) == ()


def test_a_model_that_does_not_take_them_hands_out_none_and_does_not_ask_its_decoder_for_any() -> None:
    class Stubborn(Decoder):
        """Whose layers cannot be named from outside."""

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, [value[0]] if name == "layers_to_capture" and value else value)

    model = Model(Stubborn())
    with pytest.raises(UsageError, match=r"hands out layers \[2\] when asked for \[2, 3\]"):
        set_boundaries(model, (2, 3))
    assert captured(model) == [] and not model.capture_aux_hidden_states
