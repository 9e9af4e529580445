"""Weights that change while a server runs: no dump holds rows of two of them, and each says of which it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headrace.dumps import DumpHeader
from headrace.reasons import Reason
from tests.sglang.cases.asking import Prompt
from tests.sglang.cases.checking import Folder, Reference
from tests.sglang.cases.rig import CHUNK, MAIN, Rig
from tests.sglang.models import HIDDEN, LAYERS, Checkpoints
from tests.support.tiny_models import tiny_llama
from tests.support.waiting import wait_until

pytestmark = pytest.mark.served(MAIN)
NORM = "model.norm.weight"


class Weights:
    """The server's checkpoint, and another of the same shape, of which the server has one at a time."""

    def __init__(self, rig: Rig, other: Path, reference: Callable[[Path, tuple[int, ...]], Reference]) -> None:
        self._rig = rig
        self._other = other
        self._reference = reference(other, rig.folder.card.boundaries)

    def load(self, model: Path, **more: object) -> None:
        """Have the server load a checkpoint."""
        body = {"model_path": str(model), **more}
        answer = self._rig.client.post("/update_weights_from_disk", body)
        assert answer.json()["success"], answer.text

    def change(self, **more: object) -> None:
        """Load the other checkpoint."""
        self.load(self._other, **more)

    def take_changed(self, prompt: Prompt) -> DumpHeader:
        """A dump of the other checkpoint's states: waited for, checked and removed."""
        return Folder(self._rig.folder.path, self._reference).take(prompt.rid, prompt.ids)


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like the server's, with other weights throughout."""
    return tiny_llama(tmp_path_factory.mktemp("weights") / "strange", layers=LAYERS, hidden=HIDDEN, seed=1)


@pytest.fixture(scope="module")
def other(strange: Path, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with other weights, but for the final norm's, which an engine declares."""
    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(strange, folder)
    weights = load_file(folder / "model.safetensors")
    weights[NORM] = load_file(checkpoints.get(MAIN.model) / "model.safetensors")[NORM]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def weights(rig: Rig, other: Path, reference: Callable[[Path, tuple[int, ...]], Reference]) -> Iterator[Weights]:
    """At the end the server has its own weights again."""
    made = Weights(rig, other, reference)
    yield made
    made.load(rig.server.model)


@pytest.mark.parametrize("name", ["a name", None])
def test_dumps_after_an_update_say_so(rig: Rig, weights: Weights, name: str | None) -> None:
    prompt = rig.prompts.new(2 * CHUNK)
    before = rig.capture(prompt).weight_version
    weights.change(weight_version=name)
    again = rig.prompts.of(prompt.ids)
    assert rig.client.capture(again).status_code == 200
    assert weights.take_changed(again).weight_version != before


def test_an_update_waits_for_a_prompt_in_the_middle(rig: Rig, weights: Weights) -> None:
    prompts = rig.prompts.some(4, 4 * CHUNK, 6 * CHUNK)
    with rig.client.slowed(0.05):
        answers = [rig.client.begin_capture(prompt) for prompt in prompts]
        rig.folder.wait_half(prompts[0].rid)
        weights.change()
    (version,) = {header.weight_version for header in rig.take_all(prompts, answers)}
    after = rig.prompts.new(CHUNK)
    assert rig.client.capture(after).status_code == 200
    assert weights.take_changed(after).weight_version != version


def test_an_update_while_a_prompt_is_retracted_is_a_loss(rig: Rig, weights: Weights) -> None:
    prompt, queued = rig.prompts.new(8 * CHUNK), rig.prompts.new(CHUNK)
    with rig.client.slowed():
        answers = [rig.client.begin_capture(prompt)]
        rig.folder.wait_half(prompt.rid)
        answers.append(rig.client.begin_capture(queued))
        wait_until(lambda: rig.waiting() == 1, what="the second one to wait")
        rig.client.pause("retract")
        weights.change()
    rig.client.resume()
    assert all(answer.result().status_code == 200 for answer in answers)
    assert rig.pieces(prompt.rid)[-1].prefix + rig.pieces(prompt.rid)[-1].rows == len(prompt.ids)
    lost = rig.take_lost(prompt)
    assert (lost.reason, "weights changed" in lost.detail) == (Reason.INCOMPLETE, True)
    weights.take_changed(queued)


def test_an_update_between_chunks_is_a_loss(rig: Rig, weights: Weights) -> None:
    """The rest of the prompt attends to keys of the old weights: right for neither."""
    prompt = rig.prompts.new(8 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        rig.client.pause("in_place")
        weights.change(flush_cache=False)
    rig.client.resume()
    assert answer.result().status_code == 200
    lost = rig.take_lost(prompt)
    assert (lost.reason, "weights changed" in lost.detail) == (Reason.INCOMPLETE, True)


def test_another_final_norm_than_was_declared_is_a_loss_until_it_is_back(
    rig: Rig, weights: Weights, strange: Path
) -> None:
    weights.load(strange)
    prompt = rig.prompts.new(CHUNK)
    assert rig.client.capture(prompt).status_code == 200
    lost = rig.take_lost(prompt)
    assert (lost.reason, "final norm" in lost.detail) == (Reason.INTERNAL, True)
    weights.load(rig.server.model)
    rig.capture(rig.prompts.of(prompt.ids))


def test_another_name_for_the_same_weights(rig: Rig) -> None:
    assert rig.client.post("/update_weight_version", {"new_version": "another"}).status_code == 200
    rig.capture(rig.prompts.new(CHUNK + 1))


def test_an_update_that_fails_leaves_the_weights(rig: Rig) -> None:
    answer = rig.client.post("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "never"})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    rig.capture(rig.prompts.new(CHUNK + 1))
