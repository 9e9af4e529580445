from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace_capture.config import CaptureConfig


def test_without_a_dump_folder_nothing_is_captured() -> None:
    assert CaptureConfig.from_environ({}) is None
    assert CaptureConfig.from_environ({"HEADRACE_DUMP_DIR": "", "HEADRACE_CAPTURE_WRITERS": "x"}) is None


def test_the_defaults_hold_where_nothing_is_given() -> None:
    assert CaptureConfig.from_environ({"HEADRACE_DUMP_DIR": "/dump"}) == CaptureConfig(dump_dir=Path("/dump"))


def test_every_variable_is_read() -> None:
    environ = {
        "HEADRACE_DUMP_DIR": "/dump",
        "HEADRACE_CAPTURE_BUFFER_BYTES": "4096",
        "HEADRACE_CAPTURE_WRITERS": "3",
        "HEADRACE_CAPTURE_DEADLINE_SECONDS": "7.5",
        "HEADRACE_CAPTURE_MAX_WAIT_SECONDS": "0",
    }
    assert CaptureConfig.from_environ(environ) == CaptureConfig(
        dump_dir=Path("/dump"), buffer_bytes=4096, writers=3, deadline_seconds=7.5, max_wait_seconds=0
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_DUMP_DIR", "relative/dump"),
        ("HEADRACE_CAPTURE_BUFFER_BYTES", "1G"),
        ("HEADRACE_CAPTURE_BUFFER_BYTES", "0"),
        ("HEADRACE_CAPTURE_WRITERS", "0"),
        ("HEADRACE_CAPTURE_WRITERS", "1.5"),
        ("HEADRACE_CAPTURE_DEADLINE_SECONDS", "nan"),
        ("HEADRACE_CAPTURE_DEADLINE_SECONDS", "-1"),
        ("HEADRACE_CAPTURE_MAX_WAIT_SECONDS", "inf"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        CaptureConfig.from_environ({"HEADRACE_DUMP_DIR": "/dump", name: value})


def test_a_buffer_that_is_not_given_holds_four_of_the_engine_s_forwards_within_bounds() -> None:
    config = CaptureConfig(dump_dir=Path("/dump"))
    assert config.buffer_for(57_388, 16_384) == 4 * 16_384 * 57_388
    assert config.buffer_for(57_388, None) == 2 << 30
    assert config.buffer_for(100, 8) == 64 << 20
    assert config.buffer_for(57_388, 1 << 20) == 12 << 30
    given = CaptureConfig(dump_dir=Path("/dump"), buffer_bytes=4096)
    assert given.buffer_for(57_388, 16_384) == 4096
