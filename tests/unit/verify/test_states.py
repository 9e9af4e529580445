"""States are compared with what the model computes: what is theirs passes, and each mix-up has its name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import UsageError
from headrace_cli.verify import Kind, Report, verify
from headrace_cli.verify.states import TOLERANCE, Deviation, judge
from headrace_dispatcher.checkpoint import checkpoint_digest
from tests.support.datasets import (
    BOUNDARIES,
    HIDDEN,
    LAYERS,
    LENGTHS,
    Alter,
    Array,
    Recipe,
    States,
    build,
    compute_states,
    fingerprint,
)
from tests.support.tiny_models import tiny_llama

ROWS = len(LENGTHS)


@pytest.fixture
def make(model: Path, states: States, tmp_path: Path) -> Callable[..., Path]:
    def make(alter: Alter | None = None, dtype: str = "F32", final_state: str = "pre_norm") -> Path:
        return build(tmp_path, model, states, Recipe(dtype=dtype, final_state=final_state, alter=alter))

    return make


def made_with(folder: Path, model: Path, other: Path) -> None:
    """Let the dataset say that it was made with another checkpoint than `model`."""
    for path in (folder / "headrace.json", folder / "inputs" / "run.json"):
        text = path.read_text().replace(str(model), str(other))
        path.write_text(text.replace(checkpoint_digest(model), checkpoint_digest(other)))


def check(folder: Path, **options: Any) -> Report:
    """Recompute every row."""
    defaults: dict[str, Any] = {
        "model": None,
        "sample": 0,
        "all_rows": True,
        "semantic": False,
        "tolerance": None,
        "progress": None,
    }
    return verify(folder, **{**defaults, **options})


def found(report: Report) -> dict[int | None, Kind]:
    assert all("\n" not in problem.detail for problem in report.problems)
    table = {problem.ordinal: problem.kind for problem in report.problems}
    assert len(table) == len(report.problems)
    return table


def only(ordinal: int, change: Callable[[Array, Array], tuple[Array, Array]]) -> Alter:
    """Alter one sample's states."""
    return lambda at, aux, final: change(aux, final) if at == ordinal else (aux, final)


@pytest.mark.parametrize("final_state", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_right_states_pass(make: Callable[..., Path], dtype: str, final_state: str) -> None:
    report = check(make(dtype=dtype, final_state=final_state))
    assert report.ok
    assert report.recomputed is not None
    assert (report.recomputed.rows, report.recomputed.tokens) == (ROWS, sum(LENGTHS))
    assert [worst.name for worst in report.recomputed.worst] == [*(f"boundary {b}" for b in BOUNDARIES), "final"]
    for worst in report.recomputed.worst:
        assert worst.median <= worst.token <= TOLERANCE[dtype]
        assert worst.frobenius <= TOLERANCE[dtype]
        assert worst.nearest > 0.1


def test_recomputing_writes_nothing(make: Callable[..., Path]) -> None:
    folder = make()
    before = fingerprint(folder)
    assert check(folder, semantic=True).ok
    assert fingerprint(folder) == before


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_exchanged_boundaries_are_named_with_what_they_match(make: Callable[..., Path], dtype: str) -> None:
    def exchange(aux: Array, final: Array) -> tuple[Array, Array]:
        return aux.reshape(-1, 3, HIDDEN)[:, [1, 0, 2]].reshape(aux.shape), final

    report = check(make(only(4, exchange), dtype))
    assert found(report) == {4: Kind.BOUNDARY}
    assert "boundary 2 matches layer 4's input better" in report.problems[0].detail
    assert "boundary 4 matches layer 2's input better" in report.problems[0].detail
    assert "boundary 5" not in report.problems[0].detail


def test_boundaries_captured_one_layer_late_are_named(make: Callable[..., Path], model: Path, states: States) -> None:
    late = compute_states(model, boundaries=[boundary + 1 for boundary in BOUNDARIES])
    assert late.token_ids == states.token_ids
    report = check(make(lambda ordinal, aux, final: (late.aux[ordinal].reshape(aux.shape), final)))
    assert found(report) == dict.fromkeys(range(ROWS), Kind.BOUNDARY)
    for boundary in BOUNDARIES:
        assert f"boundary {boundary} matches layer {boundary + 1}'s input better" in report.problems[0].detail


@pytest.mark.parametrize(
    ("final_state", "said"),
    [("pre_norm", "the final norm's output"), ("post_norm", f"layer {LAYERS}'s input")],
)
def test_a_final_state_on_the_other_side_of_the_norm_is_named(
    make: Callable[..., Path], states: States, final_state: str, said: str
) -> None:
    other = states.post_norm if final_state == "pre_norm" else states.pre_norm
    report = check(make(only(5, lambda aux, _: (aux, other[5])), final_state=final_state))
    assert found(report) == {5: Kind.BOUNDARY}
    assert f"final matches {said} better" in report.problems[0].detail


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize(("shift", "said"), [(1, "before"), (-1, "after")])
def test_rows_shifted_by_one_token_are_named(make: Callable[..., Path], dtype: str, shift: int, said: str) -> None:
    report = check(make(only(3, lambda aux, final: (np.roll(aux, shift, 0), np.roll(final, shift, 0))), dtype))
    assert found(report) == {3: Kind.SHIFTED}
    assert f"final holds at each token the states of the one {said}" in report.problems[0].detail


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_two_tokens_states_exchanged_inside_a_sample_are_seen(make: Callable[..., Path], dtype: str) -> None:
    def exchange(aux: Array, final: Array) -> tuple[Array, Array]:
        aux[[60, 61]] = aux[[61, 60]]
        return aux, final

    report = check(make(only(7, exchange), dtype))
    assert found(report) == {7: Kind.STATES}
    assert "boundary 2 is off at 2 of 90 tokens, most at token 6" in report.problems[0].detail
    assert "final" not in report.problems[0].detail


def test_one_wrong_token_at_one_boundary_is_seen(make: Callable[..., Path]) -> None:
    def spoil(aux: Array, final: Array) -> tuple[Array, Array]:
        aux[50, :HIDDEN] *= 1.001
        return aux, final

    report = check(make(only(7, spoil)))
    assert found(report) == {7: Kind.STATES}
    assert "boundary 2 is off at 1 of 90 tokens, most at token 50 by 1.0e-03" in report.problems[0].detail


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_two_rows_states_under_each_others_ids_are_named(make: Callable[..., Path], states: States, dtype: str) -> None:
    partner = {1: 2, 2: 1}
    assert LENGTHS[1] == LENGTHS[2]

    def exchange(ordinal: int, aux: Array, final: Array) -> tuple[Array, Array]:
        other = partner.get(ordinal)
        return (aux, final) if other is None else (states.aux[other].reshape(aux.shape), states.pre_norm[other])

    report = check(make(exchange, dtype))
    assert found(report) == {1: Kind.STATES, 2: Kind.STATES}
    for problem in report.problems:
        assert problem.ordinal is not None
        assert problem.detail.endswith(f"its last final state is that of ordinal {partner[problem.ordinal]}")


def test_states_of_other_weights_are_wrong_everywhere(make: Callable[..., Path], tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", seed=1)
    report = check(make(), model=other)
    assert found(report) == dict.fromkeys(range(ROWS), Kind.STATES)
    assert report.model == str(other)


def test_the_tolerance_can_be_given(make: Callable[..., Path]) -> None:
    def spoil(_ordinal: int, aux: Array, final: Array) -> tuple[Array, Array]:
        return aux * 1.01, final * 1.01

    folder = make(spoil)
    assert check(folder).counts == {Kind.STATES: ROWS}
    assert check(folder, tolerance=0.02).ok
    assert check(folder, tolerance=0.009).counts == {Kind.STATES: ROWS}


def test_a_row_with_another_fault_is_not_recomputed(make: Callable[..., Path]) -> None:
    def spoil(aux: Array, final: Array) -> tuple[Array, Array]:
        final[3] = np.nan
        return aux, final

    report = check(make(only(3, spoil)))
    assert found(report) == {3: Kind.NOT_FINITE}
    assert report.recomputed is not None
    assert report.recomputed.rows == ROWS - 1


def test_a_sample_of_rows_is_recomputed_and_progress_counts_it(make: Callable[..., Path]) -> None:
    seen: list[tuple[int, int]] = []
    report = check(make(), sample=3, all_rows=False, progress=lambda done, total: seen.append((done, total)))
    assert report.recomputed is not None
    assert report.recomputed.rows == 3
    assert seen[-1] == (ROWS + 2 + 3, ROWS + 2 + 3)
    assert all(first <= second for (first, _), (second, _) in pairwise(seen))


def test_without_the_checkpoint_a_note_says_so(make: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    folder = make()
    made_with(folder, model, tmp_path / "gone")
    report = check(folder, sample=8, all_rows=False)
    assert report.ok
    assert report.recomputed is None
    assert report.notes == (
        f"states not recomputed: {tmp_path / 'gone'} is not here; give the checkpoint with --model",
    )
    with pytest.raises(UsageError, match="give the checkpoint with --model"):
        check(folder)


def test_another_checkpoint_in_the_place_of_the_runs_is_not_taken_for_it(
    make: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    folder = make()
    other = tiny_llama(tmp_path / "other", layers=LAYERS + 1)
    for path in (folder / "headrace.json", folder / "inputs" / "run.json"):
        path.write_text(path.read_text().replace(str(model), str(other)))
    report = check(folder, sample=8, all_rows=False)
    assert (report.ok, report.recomputed) == (True, None)
    assert f"{other} holds other files than the run's checkpoint did; give" in report.notes[0]
    asked = check(folder, model=other, sample=2, all_rows=False)
    assert not asked.ok
    assert asked.notes == (f"{other} holds other files than the run's checkpoint did: recomputed with it all the same",)


def test_a_model_that_does_not_exist_is_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint folder"):
        check(make(), model=tmp_path / "nowhere")


@pytest.mark.parametrize("shape", [{"hidden": 32}, {"layers": 4}])
def test_a_model_of_another_size_is_refused(make: Callable[..., Path], tmp_path: Path, shape: dict[str, int]) -> None:
    other = tiny_llama(tmp_path / "other", **shape)
    with pytest.raises(UsageError, match="the run has boundaries"):
        check(make(), model=other)


def test_a_model_with_a_smaller_vocabulary_is_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", vocab=300)
    with pytest.raises(UsageError, match="beyond the model's 300"):
        check(make(), model=other)


def test_a_damaged_checkpoint_is_refused_when_named_and_noted_otherwise(
    make: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    folder = make()
    with pytest.raises(UsageError, match="cannot be used"):
        check(folder, model=broken)
    made_with(folder, model, broken)
    report = check(folder, sample=2, all_rows=False)
    assert report.recomputed is None
    assert report.notes[0].startswith("states not recomputed: ")


def test_a_checkpoint_larger_than_the_memory_is_not_loaded_unless_named(
    make: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    large = Path(shutil.copytree(model, tmp_path / "large"))
    with (large / "zzz.safetensors").open("wb") as file:
        file.truncate(8 << 40)
    folder = make()
    made_with(folder, model, large)
    report = check(folder, sample=2, all_rows=False)
    assert report.recomputed is None
    assert "does not fit this machine in float32" in report.notes[0]


_WITHOUT_TORCH = """
import sys
from pathlib import Path
from types import ModuleType

sys.modules["torch"] = ModuleType("torch") if sys.argv[2] else None  # half installed, or as if it were not
again = sys.argv[2] and "--force-reinstall "
from headrace.errors import UsageError
from headrace_cli.verify import verify

options = dict(model=None, sample=2, semantic=True, tolerance=None, progress=None)
report = verify(Path(sys.argv[1]), all_rows=False, **options)
assert report.ok and report.rows == 8 and report.recomputed is None and report.ranks is None
assert len(report.notes) == 2, report.notes
assert all(f"pip install {again}'headrace[verify]'" in note for note in report.notes), report.notes
try:
    verify(Path(sys.argv[1]), all_rows=True, **options)
except UsageError as error:
    assert f"pip install {again}'headrace[verify]'" in str(error)
else:
    raise AssertionError("every row was asked for and none recomputed")
"""


@pytest.mark.parametrize("half", ["", "half"], ids=["none", "half"])
def test_without_a_whole_torch_all_but_the_states_is_verified_and_the_extra_is_named(
    make: Callable[..., Path], half: str
) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH, make(), half], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RIGHT = Deviation(
    name="boundary 4",
    expected=4,
    tokens=90,
    frobenius=1e-6,
    median=1e-6,
    worst=1e-6,
    worst_token=3,
    beyond=0,
    medians={3: 0.4, 4: 1e-6, 5: 0.3},
    before=1.0,
    after=1.1,
)


def test_the_nearest_boundary_decides_even_within_the_tolerance() -> None:
    deviation = replace(RIGHT, median=0.04, medians={3: 0.01, 4: 0.04, 5: 0.1})
    judged = judge(deviation, 0.05)
    assert judged is not None
    assert judged[0] is Kind.BOUNDARY
    assert judge(RIGHT, 1e-4) is None


def test_a_boundary_that_is_nearer_but_far_is_no_match() -> None:
    deviation = replace(RIGHT, median=1.4, medians={3: 1.3, 4: 1.4, 5: 1.35})
    judged = judge(deviation, 0.05)
    assert judged is not None
    assert judged[0] is Kind.STATES
