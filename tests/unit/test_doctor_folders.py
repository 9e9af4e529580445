"""The folders that a doctor is pointed at, and those that cannot be looked into."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace_cli.doctor.folders import absolute, given_checkpoint, make_or_refuse, served_checkpoint, too_large

NO_NAME = "x" * 5000


def test_a_model_that_no_filesystem_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long; give another --model"):
        given_checkpoint(str(tmp_path / NO_NAME))
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        given_checkpoint(str(tmp_path))


def test_an_engines_own_path_is_taken_where_it_is_a_checkpoint_here(tmp_path: Path) -> None:
    assert served_checkpoint({}, tmp_path) == (tmp_path, "")
    (tmp_path / "config.json").touch()
    assert served_checkpoint({"model_path": str(tmp_path)}, None) == (tmp_path, "")


@pytest.mark.parametrize("named", ["org/model", "/nowhere/model", f"/{NO_NAME}", "/dev/null/model", 7])
def test_an_engines_own_path_that_is_not_here_is_told(named: object) -> None:
    found, why = served_checkpoint({"model_path": named}, None)
    assert found is None
    assert "--model" in why
    assert len(why) < 400


def test_a_folder_that_may_not_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refused)  # root may look into everything
    found, why = served_checkpoint({"model_path": str(tmp_path)}, None)
    assert found is None
    assert "Permission denied" in why


def test_weights_that_are_not_there_are_not_recomputed(tmp_path: Path) -> None:
    assert too_large(tmp_path, 100) == ""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "No such file" in too_large(tmp_path, 100)


def test_a_place_is_made_only_in_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert absolute(Path("rows")) == gone / "rows"
    gone.rmdir()
    with pytest.raises(UsageError, match="the working folder is gone"):
        absolute(Path("rows"))
    with pytest.raises(UsageError, match="cannot be used"):
        make_or_refuse(tmp_path / NO_NAME)
