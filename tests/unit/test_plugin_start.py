from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.boundaries import EAGLE3
from headrace.dumpfolder import read_problem
from headrace.dumps import POST_NORM, PRE_NORM, PROBLEM_FILE
from headrace.errors import UsageError
from headrace_capture.plugin import register, seams
from headrace_capture.plugin.seams import Seam, missing
from headrace_capture.plugin.settings import PluginSettings


def settings(**more: str) -> PluginSettings:
    made = PluginSettings.from_environ({"HEADRACE_DUMP_DIR": "/dump", **more})
    assert made is not None
    return made


def test_the_settings_of_the_environment() -> None:
    assert PluginSettings.from_environ({"HEADRACE_CAPTURE_BOUNDARIES": "x"}) is None
    plain = settings()
    assert (plain.boundaries, plain.final_state, plain.capture.dump_dir) == (EAGLE3, "", Path("/dump"))
    assert settings(HEADRACE_CAPTURE_BOUNDARIES="2,16,29").boundaries == (2, 16, 29)
    assert settings(HEADRACE_CAPTURE_BOUNDARIES="7").boundaries == (7,)
    for final_state in (PRE_NORM, POST_NORM):
        assert settings(HEADRACE_CAPTURE_FINAL_STATE=final_state).final_state == final_state


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_CAPTURE_BOUNDARIES", "eagle"),
        ("HEADRACE_CAPTURE_BOUNDARIES", "2;16"),
        ("HEADRACE_CAPTURE_BOUNDARIES", "16,2"),
        ("HEADRACE_CAPTURE_BOUNDARIES", "-1,2"),
        ("HEADRACE_CAPTURE_FINAL_STATE", "prenorm"),
        ("HEADRACE_CAPTURE_WRITERS", "many"),
    ],
)
def test_a_bad_setting_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        settings(**{name: value})


def test_without_a_dump_folder_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_DUMP_DIR", raising=False)
    monkeypatch.setenv("HEADRACE_CAPTURE_WRITERS", "many")
    monkeypatch.chdir(tmp_path)
    register()
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_is_wrong_is_said_in_the_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HEADRACE_DUMP_DIR", str(folder))
    monkeypatch.setenv("HEADRACE_CAPTURE_WRITERS", "many")
    register()
    assert "HEADRACE_CAPTURE_WRITERS" in read_problem(folder / PROBLEM_FILE).problem


def test_a_server_without_the_places_that_capture_stands_on_is_told_which(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("HEADRACE_DUMP_DIR", str(folder))
    register()  # there is no SGLang here at all
    problem = read_problem(folder / PROBLEM_FILE).problem
    for seam in seams.SEAMS:
        assert seam.path in problem


@pytest.mark.parametrize("folder_text", ["relative/folder", "/proc/no/such/folder"])
def test_a_folder_that_cannot_be_used_is_said_in_the_log_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, folder_text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_DUMP_DIR", folder_text)
    register()
    assert "headrace captures nothing" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_loading_the_plugin_without_being_asked_for_capture_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, headrace_capture.plugin as plugin; plugin.register(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert not {"torch", "sglang", "pydantic"} & set(done.stdout.split())


class Holder:
    """A class as SGLang's, of which some things are as they should be."""

    field = 3

    def method(self, batch: Any, extra: Any = None) -> None: ...


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("headrace_stand_in")
    module.Holder = Holder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace_stand_in", module)
    return "headrace_stand_in.Holder"


def test_a_seam_that_is_as_it_should_be_is_not_missing(place: str) -> None:
    assert missing((Seam(path=f"{place}.method", parameters=("self", "batch")), Seam(path=f"{place}.method"))) == []


def test_each_way_of_missing_is_named(place: str) -> None:
    found = missing(
        (
            Seam(path="headrace_no_such_module.Class.method"),
            Seam(path=f"{place}.other"),
            Seam(path=f"{place}.field"),
            Seam(path=f"{place}.method", parameters=("self", "forward_batch")),
        )
    )
    assert ["is not there" in found[0], "is not there" in found[1], "is no function" in found[2]] == [True] * 3
    assert found[3] == f"{place}.method takes ['self', 'batch'], not ['self', 'forward_batch']"


class Registry:
    """SGLang's, of which only the targets are kept."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def register(self, target: str, hook: Any, kind: Any) -> None:
        self.targets.append(target)


@pytest.mark.parametrize("there", [True, False])
def test_a_place_without_which_capture_goes_on_is_hooked_where_it_is(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    registry, module = Registry(), ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = registry  # type: ignore[attr-defined]
    module.HookType = dict.fromkeys(("AFTER", "AROUND", "BEFORE"))  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(seams, "weight_writers", lambda: ("writer",))
    monkeypatch.setattr(seams, "missing", lambda some=seams.SEAMS: [] if there or some == seams.SEAMS else ["missing"])
    monkeypatch.setenv("HEADRACE_DUMP_DIR", "/dump")
    register()
    wanted = {*(seam.path for seam in seams.SEAMS if "WeightUpdater" not in seam.path), "writer"}
    assert set(registry.targets) == wanted | ({seams.ANSWER_FIELD} if there else set())


def test_whatever_writes_weights_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class WeightUpdater:
        def update_weights_from_disk(self) -> None: ...
        def load_weights_from_distributed(self) -> None: ...
        def begin_weight_update(self) -> None: ...
        def end_weight_update(self) -> None: ...
        def init_weights_update_group(self) -> None: ...
        def _assert_weight_cache_inactive(self) -> None: ...

    monkeypatch.setattr(seams, "resolve", lambda _path: WeightUpdater)
    assert [path.rsplit(".", 1)[1] for path in seams.weight_writers()] == [
        "begin_weight_update",
        "end_weight_update",
        "load_weights_from_distributed",
        "update_weights_from_disk",
    ]
