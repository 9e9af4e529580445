"""The embedded engine: a real process, real requests, and the states it captures against a plain forward."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.dumpfolder import read_card, read_dump, read_norm
from headrace.dumps import DUMP_SUFFIX, ENGINE_FILE
from headrace.ids import RequestId, is_ours
from tests.support.engine import SCRIPT, EngineProcess, engine_environ, random_ids
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

LENGTHS = (1, 5, 200, 63, 64, 65, 17, 130, 30, 90, 3, 128)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def dump_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "dumps"


@pytest.fixture(scope="module")
def engine(tiny: Path, dump_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with steps of 64 tokens, which splits and mixes prompts."""
    folder = tmp_path_factory.mktemp("process")
    flags = ("--model", str(tiny), "--model-name", "tiny", "--chunk-tokens", "64", "--weight-version", "w1")
    with EngineProcess(folder, *flags, environ={"HEADRACE_DUMP_DIR": str(dump_dir)}) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


def rid_for(ids: list[int], ordinal: int, nonce: str = "abcd0123") -> str:
    return str(RequestId.make("test", ordinal, nonce, ids))


def wait_dump(dump_dir: Path, rid: str) -> Path:
    path = dump_dir / f"{rid}{DUMP_SUFFIX}"
    wait_until(path.exists, what=path.name)
    return path


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


def test_states_of_split_and_mixed_prompts_are_those_of_a_plain_forward(
    engine: EngineProcess, dump_dir: Path, reference: Any
) -> None:
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    rids = [rid_for(ids, ordinal) for ordinal, ids in enumerate(prompts)]
    # Every third one decodes, so that its later rows travel with the chunks of others.
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(
            pool.map(lambda i: engine.generate(prompts[i], rids[i], 6 * (i % 3 == 0)).json(), range(len(prompts)))
        )
    parts = 0
    for ids, rid, answer in zip(prompts, rids, answers, strict=True):
        assert "headrace" not in answer["meta_info"]
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
        path = wait_dump(dump_dir, rid)
        header = read_dump(path).header
        parts = max(parts, header.parts)
        assert (header.boundaries, header.final_state, header.weight_version) == ((2, 4, 5), "pre_norm", "w1")
        states = load_file(path)
        assert states["token_ids"].tolist() == ids
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([ids]), output_hidden_states=True)
            hidden = [layer[0] for layer in expected.hidden_states]
            for place, boundary in enumerate(header.boundaries):
                rows = states["aux"][:, place * 64 : (place + 1) * 64]
                assert largest(rows - hidden[boundary]) < TOLERANCE
                assert largest(rows - hidden[boundary + 1]) > 0.1
            assert largest(reference.model.norm(states["final"]) - hidden[-1]) < TOLERANCE
            assert largest(states["final"] - hidden[-1]) > 0.1
    assert parts > 1


def test_a_continuation_is_the_greedy_one(engine: EngineProcess, reference: Any) -> None:
    ids = random_ids(70, seed=7)
    answer = engine.generate(ids, max_new_tokens=5, ignore_eos=True).json()
    with torch.inference_mode():
        for _ in range(5):
            ids.append(int(reference(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer["output_ids"] == ids[-5:]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert answer["meta_info"]["completion_tokens"] == 5


def test_warm_up_and_health_probes_are_real_forwards_that_nobody_captures(
    engine: EngineProcess, dump_dir: Path
) -> None:
    before = engine.info()["headrace"]["capture"]["ignored"]
    assert before > 0
    assert engine.info()["disable_radix_cache"] is True
    assert engine.status("/health_generate") == 200
    assert engine.info()["headrace"]["capture"]["ignored"] > before
    ids = random_ids(4, seed=1)
    wait_dump(dump_dir, engine.generate(ids, rid_for(ids, 50)).json()["meta_info"]["id"])
    card = read_card(dump_dir / ENGINE_FILE)
    names = [path.name for path in dump_dir.glob("[!.]*.safetensors") if path.name != card.norm_file]
    assert names
    assert all(is_ours(name.removesuffix(DUMP_SUFFIX)) for name in names)


def test_the_card_declares_the_engine(engine: EngineProcess, dump_dir: Path) -> None:
    card = read_card(dump_dir / ENGINE_FILE)
    assert (card.model, card.layers, card.hidden_size, card.dtype) == ("tiny", 8, 64, "F32")
    assert card.boot == engine.info()["headrace"]["boot"]
    assert card.fingerprint.startswith("headrace-engine ")
    assert card.fingerprint.endswith(f" float32 tp1 norm-{read_norm(dump_dir / card.norm_file).digest}")
    assert load_file(dump_dir / card.norm_file)["weight"].shape == (64,)
    assert requests.get(f"{engine.url}/get_model_info", timeout=30).json()["model_path"] == "tiny"


def test_a_request_id_in_flight_is_refused_and_an_abort_by_prefix_ends_the_first(engine: EngineProcess) -> None:
    ids = random_ids(10, seed=3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.generate, ids, "mine-1", 8000, ignore_eos=True)
        wait_until(engine.in_flight, what="the first request")
        again = engine.generate(ids, "mine-1")
        assert again.status_code == 400
        assert "Duplicate request ID" in again.json()["error"]["message"]
        assert engine.generate(ids, "other").json()["meta_info"]["finish_reason"]["type"] == "length"
        assert engine.post("/abort_request", {"rid": "mine"}).status_code == 200
        meta = first.result(60).json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < meta["completion_tokens"] < 8000


def test_a_client_that_goes_away_takes_its_request_along(engine: EngineProcess) -> None:
    with pytest.raises(requests.Timeout):
        engine.generate(random_ids(10, seed=4), "gone", 8000, timeout=0.5, ignore_eos=True)
    wait_until(lambda: engine.in_flight() == 0, what="the request to be aborted")


def test_what_is_aborted_in_the_middle_of_its_prompt_is_lost_by_name(engine: EngineProcess, dump_dir: Path) -> None:
    ids = random_ids(8000, seed=5)
    rid = rid_for(ids, 60)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, ids, rid)
        wait_until(lambda: engine.info()["headrace"]["capture"]["half_assembled"], what="a first chunk")
        engine.post("/abort_request", {"abort_all": True})
        assert answer.result(60).json()["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until((dump_dir / f"{rid}.lost.json").exists, what="the lost notice")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1, 400]}, "outside of 0 to 399"),
        ({"input_ids": [-1]}, "outside of 0 to 399"),
        ({"input_ids": [1] * 8187}, "longer than the model's limit (8186 tokens)"),
        ({"input_ids": [[1, 2], [3]]}, "one prompt as a list of token ids"),
        ({"input_ids": [1, True]}, "one prompt as a list of token ids"),
        ({"text": "Hello"}, "one prompt as a list of token ids"),
        ({"input_ids": [1], "rid": ["a"]}, "rid"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ("no object", "body"),
    ],
)
def test_a_bad_body_is_refused_as_sglang_does(engine: EngineProcess, body: Any, message: str) -> None:
    answer = engine.post("/generate", body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_unknown_fields_are_taken(engine: EngineProcess) -> None:
    body = {"input_ids": [5, 6], "extra_key": "x", "stream": False, "sampling_params": {"top_p": 1.0}}
    assert engine.post("/generate", body).status_code == 200
    assert engine.post("/abort_request", {}).status_code == 400


def test_a_prefix_cache_is_told_and_what_comes_from_it_is_lost_by_name(tiny: Path, tmp_path: Path) -> None:
    dump_dir = tmp_path / "dumps"
    flags = ("--model", str(tiny), "--prefix-cache", "1000")
    with EngineProcess(tmp_path, *flags, environ={"HEADRACE_DUMP_DIR": str(dump_dir)}) as engine:
        engine.wait_ready()
        assert engine.info()["disable_radix_cache"] is False
        warm = engine.info()["headrace"]["requests"]["cached_tokens"]
        ids = random_ids(30, seed=1)

        def meta(nonce: str, extra_key: str) -> dict[str, Any]:
            body = {"input_ids": ids, "rid": rid_for(ids, 0, nonce), "extra_key": extra_key}
            answer = engine.post("/generate", body | {"sampling_params": {"max_new_tokens": 0}})
            table: dict[str, Any] = answer.json()["meta_info"]
            return table

        first, again, own = meta("aaaa0000", "x"), meta("bbbb0000", "x"), meta("cccc0000", "y")
        assert [each["cached_tokens"] for each in (first, again, own)] == [0, 29, 0]
        assert [each.get("headrace") for each in (first, again, own)] == [None, "dropped:prefix_cached", None]
        wait_dump(dump_dir, own["id"])
        assert engine.info()["headrace"]["requests"]["cached_tokens"] == warm + 2 * len(ids)


def test_full_queue_limit_and_sigterm(tiny: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny), "--max-queued", "1", "--boundaries", "0,8", "--final-state", "post_norm")
    with EngineProcess(tmp_path, *flags, "--context-length", "6000") as engine:
        while (status := engine.status("/health")) != 200:
            assert status == 503
        assert engine.generate(random_ids(5994, seed=1)).status_code == 200
        assert engine.generate(random_ids(5995, seed=1)).status_code == 400
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(engine.generate, [5, 6, 7], "long", 5000, ignore_eos=True)
            wait_until(engine.in_flight, what="the request")
            assert engine.generate([5]).status_code == 503
            assert engine.terminate(20) == 0
            assert last.result(20).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_sigterm_while_the_model_loads_ends_the_engine(tiny: Path, tmp_path: Path) -> None:
    with EngineProcess(tmp_path, "--model", str(tiny)) as engine:
        assert engine.terminate(30) == 0


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--port", "x"], {}, "--port"),
        (["--prot", "1"], {}, "--prot"),
        (["--dtype", "int8"], {}, "--dtype"),
        (["--model", "/nowhere"], {}, "/nowhere holds no config.json"),
        ([], {"HEADRACE_ENGINE_PROT": "1"}, "HEADRACE_ENGINE_PROT"),
        ([], {"HEADRACE_DUMP_DIR": "relative"}, "absolute"),
        (["--port", "0", "--boundaries", "5,3"], {}, "boundaries [5, 3]"),
        (["--port", "0", "--boundaries", "3,9"], {}, "0 to 8"),
        (["--port", "0", "--context-length", "9000"], {}, "8192"),
    ],
)
def test_a_bad_option_ends_in_one_line(tiny: Path, flags: list[str], variables: dict[str, str], message: str) -> None:
    environ = engine_environ(**variables, HEADRACE_ENGINE_MODEL=str(tiny), HEADRACE_ENGINE_LOG_LEVEL="error")
    ended = subprocess.run([SCRIPT, *flags], env=environ, stderr=subprocess.PIPE, text=True, timeout=90, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("headrace-engine: ")
    assert ended.stderr.count("\n") == 1
    assert message in ended.stderr


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_a_host_that_is_not_this_machine_is_named(tiny: Path, host: str) -> None:
    ended = subprocess.run(
        [SCRIPT, "--model", str(tiny), "--host", host, "--port", "0"],
        env=engine_environ(), stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert f"{host} port 0" in ended.stderr


def test_a_taken_port_is_named(tiny: Path, engine: EngineProcess) -> None:
    port = engine.url.rpartition(":")[2]
    ended = subprocess.run(
        [SCRIPT, "--model", str(tiny), "--port", port],
        env=engine_environ(), stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 4
    assert f"port {port}" in ended.stderr
