"""The cases on the oldest SGLang that the plugin is for, where it stands on the logits processor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sglang.cases import (
    test_aborts,
    test_chunks,
    test_decoding,
    test_ids,
    test_others,
    test_prefixes,
    test_retraction,
    test_weights,
)
from tests.sglang.cases.rig import MAIN, Rig
from tests.sglang.env import OLDEST

FLAGS = (*MAIN.flags, "--enable-return-hidden-states")  # without it, 0.5.16 refuses who asks for them
# Cases that ask of SGLang what this version does not do, with or without the plugin.
DIFFERENT = {
    "test_all_kinds_of_traffic_at_once": "its scheduler ends when scores and log probabilities meet in a batch",
    "test_a_prompt_is_retracted_between_its_chunks[True]": "it empties no cache while a request is retracted",
    "test_an_update_while_a_prompt_is_retracted_is_a_loss": "its scheduler ends, since it cannot empty its cache then",
    "test_requests_that_generate_make_way_for_somebody_elses_of_a_higher_priority": "no retraction was seen there",
    "test_ids_that_are_not_ours_leave_nothing": "it refuses an id for several prompts after one for several answers",
}
pytestmark = pytest.mark.served(replace(MAIN, version=OLDEST, native=False, flags=FLAGS))


@pytest.fixture(autouse=True)
def _not_here(request: pytest.FixtureRequest) -> None:
    if request.node.name in DIFFERENT:
        pytest.skip(DIFFERENT[request.node.name])


def test_it_is_the_oldest(rig: Rig) -> None:
    assert rig.server.get("/get_server_info").json()["version"] == OLDEST
    assert f" {OLDEST} " in f" {rig.server.card().fingerprint} "


weights, other, strange = test_weights.weights, test_weights.other, test_weights.strange
for _module in (
    test_aborts,
    test_chunks,
    test_decoding,
    test_ids,
    test_others,
    test_prefixes,
    test_retraction,
    test_weights,
):
    for _name, _case in vars(_module).items():
        if _name.startswith("test_"):
            assert _name not in globals(), f"two cases are called {_name}"
            globals()[_name] = _case
