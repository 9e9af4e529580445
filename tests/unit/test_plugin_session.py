from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.dumpfolder import read_card, read_dump, read_problem
from headrace.dumps import ENGINE_FILE, POST_NORM, PRE_NORM, PROBLEM_FILE
from headrace.reasons import Reason
from headrace_capture.plugin import target
from headrace_capture.plugin.session import INFO
from tests.support.capture import BOUNDARIES, WEIGHTS, assert_published, dump_path, lost, prompt
from tests.support.scheduler import Decoder, Scheduler, Step, runner_of

Make = Callable[..., Scheduler]


@pytest.fixture(params=[True, False], ids=["auxiliary output", "logits processor"])
def make(request: pytest.FixtureRequest, folder: Path) -> Iterator[Make]:
    """Makes a scheduler whose model is loaded, over `folder`."""
    made: list[Scheduler] = []

    def start(**changes: Any) -> Scheduler:
        scheduler = Scheduler(folder, **{"native": request.param, **changes})
        made.append(scheduler)
        scheduler.load()
        return scheduler

    yield start
    for scheduler in made:
        scheduler.session.close()


def answer(output: Any) -> Any:
    """What the answers of a batch say of dropped requests."""
    return (output.customized_info or {}).get(INFO)


def test_the_card_says_what_is_captured(make: Make, folder: Path) -> None:
    make()
    card = read_card(folder / ENGINE_FILE)
    assert (card.boundaries, card.final_state, card.layers, card.dtype) == (BOUNDARIES, PRE_NORM, 8, "BF16")
    assert (card.model, card.weight_version) == ("tiny", WEIGHTS)
    assert card.fingerprint.startswith("sglang 0.0.0 tiny bfloat16 tp1 norm-") and card.norm_file


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_prompts_beside_others_and_decode_rows_and_padding_are_captured(
    make: Make, folder: Path, packed: bool, residual: bool
) -> None:
    scheduler = make()
    ours, other = [prompt(20, ordinal=1), prompt(7, ordinal=2)], prompt(11, rid="HEALTH_CHECK_1")
    rows = [(ours[0], 0, 20), (other, 0, 11), (ours[1], 0, 7)]
    decode = [prompt(5, ordinal=3), other]
    output = scheduler.run(
        Step(rows=rows, mode="MIXED", decode=decode, padding=5, packed=packed, residual=residual),
    )
    assert answer(output) is None
    for one in ours:
        assert_published(folder, one)
    assert len(list(folder.glob("hr-*"))) == 2


def test_a_prompt_of_several_chunks_is_captured_whole(make: Make, folder: Path) -> None:
    scheduler, one = make(), prompt(30)
    for begin, end in ((0, 12), (12, 24), (24, 30)):
        scheduler.run(Step(rows=[(one, begin, end)]))
    assert assert_published(folder, one).parts == 3


def test_post_norm_is_what_the_logits_processor_is_given(make: Make, folder: Path) -> None:
    scheduler, one = make(final_state=POST_NORM), prompt(9)
    scheduler.run(Step(rows=[(one, 0, 9)], norm=False))
    dump = read_dump(dump_path(folder, one))
    assert dump.header.final_state == POST_NORM
    final = dump_path(folder, one).read_bytes()[-9 * 16 * 2 :]
    assert final == bytes((one.final * 2).view(torch.uint8).flatten().tolist())


def test_a_forward_without_the_norms_input_is_a_loss_and_never_an_older_forwards_rows(make: Make, folder: Path) -> None:
    scheduler, first, second = make(), prompt(9, ordinal=1), prompt(9, ordinal=2)
    scheduler.run(Step(rows=[(first, 0, 9)]))
    output = scheduler.run(Step(rows=[(second, 0, 9)], norm=False))
    assert lost(folder, second).reason == Reason.INTERNAL
    assert "the final norm was not called" in lost(folder, second).detail
    assert answer(output) == ["dropped:internal"]


def test_a_forward_without_states_is_a_loss_and_never_an_older_forwards_rows(make: Make, folder: Path) -> None:
    scheduler, first, second = make(), prompt(9, ordinal=1), prompt(9, ordinal=2)
    scheduler.run(Step(rows=[(first, 0, 9)]))
    scheduler.run(Step(rows=[(second, 0, 9)], logits=False))
    assert "no states came from SGLang's" in lost(folder, second).detail


def test_what_a_warm_up_or_a_graphs_capture_left_is_nobodys(make: Make, folder: Path) -> None:
    scheduler, one, two = make(), prompt(9, ordinal=1), prompt(9, ordinal=2)
    scheduler.forward(scheduler.runner, Step(rows=[(one, 0, 9)]), dummy=True)
    scheduler.run(Step(rows=[(two, 0, 9)], norm=False, logits=False))
    assert lost(folder, two).reason == Reason.INTERNAL
    assert not dump_path(folder, one).exists()


def test_other_runners_and_kinds_of_forwards_are_left_alone(make: Make, folder: Path) -> None:
    scheduler, one = make(), prompt(9)
    draft = runner_of(scheduler.model, is_draft_worker=True)
    scheduler.run(Step(rows=[(one, 0, 4)]), during=lambda: scheduler.forward(draft, Step(rows=[(one, 0, 9)])))
    for mode in ("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"):
        scheduler.run(Step(rows=[(one, 0, 9)], mode=mode))
    assert list(folder.glob("hr-*")) == []
    scheduler.run(Step(rows=[(one, 4, 9)]))
    assert_published(folder, one)


@pytest.mark.parametrize("mode", ["SPLIT_PREFILL", "DLLM_EXTEND", "SOMETHING_NEW"])
def test_a_kind_of_forward_that_is_not_known_is_a_loss(make: Make, folder: Path, mode: str) -> None:
    scheduler, one = make(), prompt(9)
    scheduler.run(Step(rows=[(one, 0, 9)], mode=mode))
    assert mode in lost(folder, one).detail


def test_the_stub_of_a_prompt_that_was_refused_as_too_long_is_a_loss(make: Make, folder: Path) -> None:
    scheduler, one = make(), prompt(30)
    output = scheduler.run(Step(rows=[(one, 0, 1)], prompts={one.rid: 1}))
    assert lost(folder, one).reason == Reason.INCOMPLETE
    assert answer(output) == ["dropped:incomplete"]


def test_the_stub_of_a_refused_prompt_is_a_loss_though_the_prompt_had_one_token_too(make: Make, folder: Path) -> None:
    scheduler, one, other = make(), prompt(1, ordinal=1), prompt(1, ordinal=2)
    output = scheduler.run(Step(rows=[(one, 0, 1), (other, 0, 1)], refused=[one]))
    assert lost(folder, one).reason == Reason.INCOMPLETE
    assert answer(output) == ["dropped:incomplete", None]
    assert_published(folder, other)


def test_what_is_said_of_a_drop_is_of_the_whole_request(make: Make) -> None:
    scheduler = make()
    assert scheduler.is_of_a_request(INFO) is True
    assert scheduler.is_of_a_request("theirs") is None  # SGLang's own answer stays


def test_a_drop_is_said_again_with_the_last_chunk_whose_answer_is_read(make: Make) -> None:
    scheduler, one, other = make(), prompt(30), prompt(5, rid="other")
    scheduler.run(Step(rows=[(one, 0, 12)], norm=False))
    output = scheduler.run(Step(rows=[(other, 0, 5), (one, 12, 30)]))
    assert answer(output) == [None, "dropped:internal"]


def test_an_answer_keeps_what_others_put_into_it(make: Make) -> None:
    scheduler, one = make(), prompt(9)
    output = scheduler.run(Step(rows=[(one, 0, 9)], norm=False))
    assert output.customized_info == {INFO: ["dropped:internal"]}
    session, pieces = scheduler.session, scheduler.session._pieces
    batch = SimpleNamespace(rids=[one.rid], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[9])
    output.customized_info = {"theirs": [1]}
    session._answer({}, pieces(batch), output)
    assert output.customized_info == {"theirs": [1], INFO: ["dropped:internal"]}


@pytest.mark.parametrize("everything", [True, False])
def test_an_abort_ends_what_is_half_assembled(make: Make, folder: Path, everything: bool) -> None:
    scheduler, one = make(), prompt(30)
    scheduler.run(Step(rows=[(one, 0, 12)]))
    scheduler.abort("hr-another-run")
    assert not (folder / f"{one.rid}.lost.json").exists()
    scheduler.abort("" if everything else one.rid[:-4], abort_all=everything)
    assert lost(folder, one).reason == Reason.ABORTED
    scheduler.run(Step(rows=[(one, 12, 30)]))
    assert not dump_path(folder, one).exists()


def test_an_abort_of_a_whole_request_takes_nothing_away(make: Make, folder: Path) -> None:
    scheduler, one = make(), prompt(30)
    scheduler.run(Step(rows=[(one, 0, 30)]))
    scheduler.abort(one.rid)
    assert_published(folder, one)


def test_weights_that_were_updated_have_another_name_and_never_mix(make: Make, folder: Path) -> None:
    scheduler, before, across, after = make(), prompt(9, ordinal=1), prompt(30, ordinal=2), prompt(9, ordinal=3)
    scheduler.run(Step(rows=[(before, 0, 9)]))
    scheduler.run(Step(rows=[(across, 0, 12)]))
    scheduler.update_weights()
    scheduler.run(Step(rows=[(across, 12, 30)]))
    scheduler.run(Step(rows=[(after, 0, 9)]))
    assert assert_published(folder, before).weight_version == WEIGHTS
    assert lost(folder, across).reason == Reason.INCOMPLETE
    assert assert_published(folder, after).weight_version == f"{WEIGHTS}+1"
    scheduler.update_weights()
    scheduler.run(Step(rows=[(prompt(9, ordinal=4), 0, 9)]))
    assert assert_published(folder, prompt(9, ordinal=4)).weight_version == f"{WEIGHTS}+2"


def test_nothing_is_captured_with_another_final_norm_than_was_declared(make: Make, folder: Path) -> None:
    scheduler, one, two = make(), prompt(9, ordinal=1), prompt(9, ordinal=2)
    scheduler.update_weights()
    scheduler.model.model.norm.weight[3] = 1.5
    for each in (one, two):
        scheduler.run(Step(rows=[(each, 0, 9)]))
        assert "restart the engine" in lost(folder, each).detail


def test_a_hook_that_fails_costs_requests_and_never_the_server(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, one, two = make(), prompt(9, ordinal=1), prompt(9, ordinal=2)
    target = scheduler.session._target
    assert target is not None

    def fail(_output: Any) -> None:
        raise RuntimeError("provoked")

    with monkeypatch.context() as patch:
        patch.setattr(type(target.source), "take", lambda _self, output: fail(output))
        scheduler.run(Step(rows=[(one, 0, 9)]))
    assert lost(folder, one).reason == Reason.INTERNAL and "provoked" in lost(folder, one).detail
    scheduler.run(Step(rows=[(two, 0, 9)]))
    assert_published(folder, two)


def test_a_batch_that_is_not_as_it_should_be_costs_its_requests(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, one = make(), prompt(9)

    def fail(_batch: Any) -> Any:
        raise KeyError("provoked")

    monkeypatch.setattr(scheduler.session, "_pieces", fail)
    scheduler.run(Step(rows=[(one, 0, 9)]))
    assert lost(folder, one).reason == Reason.INTERNAL


def test_a_rank_whose_rows_another_captures_hands_out_the_same_layers_and_opens_nothing(
    make: Make, folder: Path
) -> None:
    scheduler = make(captures=False)
    assert scheduler.model.model.layers_to_capture == list(BOUNDARIES)
    scheduler.run(Step(rows=[(prompt(9), 0, 9)]))
    assert not folder.exists()


def test_arguments_in_the_way_leave_the_model_as_it_is_and_a_notice(make: Make, folder: Path) -> None:
    scheduler = make(arguments={"pp_size": 2, "enable_pdmux": True})
    assert scheduler.capture is None
    assert scheduler.model.model.layers_to_capture == ([2, 4, 5] if scheduler.native else [])
    problem = read_problem(folder / PROBLEM_FILE).problem
    assert "--pp-size" in problem and "--enable-pdmux" in problem
    assert not (folder / ENGINE_FILE).exists()
    scheduler.run(Step(rows=[(prompt(9), 0, 9)]))
    scheduler.abort(abort_all=True)
    scheduler.update_weights()
    assert list(folder.glob("hr-*")) == []


def test_a_model_that_does_not_keep_the_layers_is_no_engine(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make()
    monkeypatch.setattr(Decoder, "layers_to_capture", Unwilling(), raising=False)
    scheduler.get_ready()
    assert "hands out layers [1]" in read_problem(folder / PROBLEM_FILE).problem
    assert not (folder / ENGINE_FILE).exists() and scheduler.capture is None


class Unwilling:
    """An attribute that is a list of one layer whatever it is set to."""

    def __get__(self, _owner: Any, _type: Any) -> list[int]:
        return [1]

    def __set__(self, _owner: Any, _value: Any) -> None: ...


def test_an_engine_declares_itself_when_nothing_can_fail_any_more(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_norm: Any) -> None:
        raise MemoryError("provoked")

    monkeypatch.setattr(target, "DeclaredNorm", fail)
    assert make().capture is None
    assert "provoked" in read_problem(folder / PROBLEM_FILE).problem
    assert not (folder / ENGINE_FILE).exists()


def test_a_folder_that_cannot_be_used_leaves_the_server_running(folder: Path) -> None:
    folder.write_text("no folder")
    scheduler = Scheduler(folder, native=False)
    scheduler.load()
    assert scheduler.capture is None
    scheduler.run(Step(rows=[(prompt(9), 0, 9)]))


def test_auxiliary_output_that_a_model_replaces_by_the_norms_input_is_a_loss(folder: Path) -> None:
    scheduler, one = Scheduler(folder, native=True, boundaries=(4,)), prompt(9)
    scheduler.load()
    scheduler.run(Step(rows=[(one, 0, 9)], before_norm=True))
    assert lost(folder, one).reason == Reason.INTERNAL
    scheduler.session.close()
