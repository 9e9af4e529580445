from __future__ import annotations

import torch
from torch import nn

from headrace_capture.plugin.finalnorm import DeclaredNorm, PreNormTap, find_final_norm
from tests.support.capture import HIDDEN
from tests.support.scheduler import Decoder, Model, RMSNorm


def test_the_norm_of_the_module_that_runs_the_layers_is_found_also_in_a_wrapper() -> None:
    model, wrapper = Model(), nn.Module()
    wrapper.language_model = model
    for outer in (model, wrapper):
        found = find_final_norm(outer)
        assert found is not None and found.module is model.model.norm
        assert found.weight is model.model.norm.weight and found.eps == 1e-5


def test_a_norm_that_is_no_plain_rmsnorm_has_no_weight_to_publish() -> None:
    class GemmaRMSNorm(RMSNorm): ...

    model = Model()
    model.model.norm = GemmaRMSNorm()
    found = find_final_norm(model)
    assert found is not None and found.weight is None and found.eps == 0.0
    assert DeclaredNorm(found).holds()


def test_a_model_without_a_norm_there_has_none() -> None:
    model = Model()
    model.model.norm = None  # type: ignore[assignment]
    assert find_final_norm(model) is None
    assert find_final_norm(nn.Module()) is None


def test_the_tap_has_the_sum_or_the_argument_once_and_only_when_wanted() -> None:
    norm, wanted = RMSNorm(), [True]
    tap = PreNormTap(norm, lambda: wanted[0])
    one, two = torch.ones(3, HIDDEN), torch.full((3, HIDDEN), 2.0)
    norm(one, two)
    taken = tap.take()
    assert taken is not None and torch.equal(taken, one + two)
    assert tap.take() is None
    norm(one)
    assert tap.take() is one
    norm(one)
    tap.clear()
    assert tap.take() is None
    wanted[0] = False
    norm(one)
    assert tap.take() is None


def test_the_tap_never_raises_whatever_the_norm_returns() -> None:
    class Odd(nn.Module):
        def forward(self, *_: object, **__: object) -> object:
            return (None,)

    norm = Odd()
    tap = PreNormTap(norm, lambda: True)
    norm()
    assert tap.take() is None
    norm(states=torch.ones(1))
    assert tap.take() is None


def test_a_norm_that_changed_or_was_replaced_is_not_the_declared_one() -> None:
    decoder = Decoder()
    model = Model()
    model.model = decoder
    found = find_final_norm(model)
    assert found is not None
    declared = DeclaredNorm(found)
    assert declared.holds()
    decoder.norm.weight = nn.Parameter(decoder.norm.weight.clone(), requires_grad=False)
    assert declared.holds()
    decoder.norm.weight[0] += 1
    assert not declared.holds()
