from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.settings import Settings, load_settings


def message_of(**overrides: Any) -> str:
    with pytest.raises(UsageError) as error:
        load_settings(**overrides)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_without_anything_the_defaults_hold() -> None:
    settings = load_settings()
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert settings.redis_password.get_secret_value() == ""
    assert settings.health_port == 0


def test_a_variable_is_read_and_an_argument_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_WINDOW", "5")
    assert load_settings().window == 5
    assert load_settings(window=7).window == 7
    assert load_settings(window=None).window == 5


def test_a_secret_comes_from_its_file_without_the_newline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("pass word \r\n")
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", str(secret))
    settings = load_settings()
    assert settings.redis_password.get_secret_value() == "pass word "
    assert "pass word" not in repr(settings)


def test_any_setting_may_come_from_a_file_and_a_variable_goes_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "window").write_text("9\n")
    monkeypatch.setenv("HEADRACE_WINDOW_FILE", str(tmp_path / "window"))
    assert load_settings().window == 9
    monkeypatch.setenv("HEADRACE_WINDOW", "8")
    assert load_settings().window == 8


def test_a_secret_file_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", str(tmp_path / "gone"))
    assert "HEADRACE_REDIS_PASSWORD_FILE" in message_of()
    assert str(tmp_path / "gone") in message_of()


def test_a_toml_file_is_read_after_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text('window = 5\nredis_url = "redis://there:1/0"\n')
    monkeypatch.setenv("HEADRACE_CONFIG", str(config))
    monkeypatch.setenv("HEADRACE_WINDOW", "6")
    settings = load_settings()
    assert (settings.window, settings.redis_url) == (6, "redis://there:1/0")


def test_a_toml_file_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", str(tmp_path))
    assert "no such file" in message_of()


@pytest.mark.parametrize("data", [b"window = ", b"\xff\xfe", b"= 5"])
def test_a_toml_file_that_does_not_parse_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes) -> None:
    config = tmp_path / "headrace.toml"
    config.write_bytes(data)
    monkeypatch.setenv("HEADRACE_CONFIG", str(config))
    assert str(config) in message_of()


def test_an_unknown_name_in_the_toml_file_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text("windw = 5\n")
    monkeypatch.setenv("HEADRACE_CONFIG", str(config))
    assert "windw" in message_of()
    assert "did you mean HEADRACE_WINDOW?" in message_of()


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("HEADRACE_REDIS_ULR", "HEADRACE_REDIS_URL"),
        ("HEADRACE_LEASE_STORNG_SECONDS", "HEADRACE_LEASE_STORING_SECONDS"),
        ("HEADRACE_REDIS_PASWORD_FILE", "HEADRACE_REDIS_PASSWORD"),
        ("HEADRACE_ZZZZZZ", ""),
    ],
)
def test_an_unknown_variable_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str
) -> None:
    monkeypatch.setenv(variable, "x")
    message = message_of()
    assert variable in message
    assert (f"did you mean {nearest}?" in message) == bool(nearest)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEADRACE_WINDOW", "many"),
        ("HEADRACE_WINDOW", "0"),
        ("HEADRACE_WINDOW", ""),
        ("HEADRACE_HEALTH_PORT", "65536"),
        ("HEADRACE_HEALTH_PORT", "-1"),
        ("HEADRACE_LOG_LEVEL", "loud"),
        ("HEADRACE_LEASE_STORING_SECONDS", "0"),
        ("HEADRACE_LEASE_STORING_SECONDS", "soon"),
        ("HEADRACE_QUARANTINE_BYTES", "-1"),
        ("HEADRACE_QUARANTINE_BYTES", str(1 << 60)),
        ("HEADRACE_MAX_TOKENS", str(1 << 60)),
        ("HEADRACE_ENGINE_URL", "foo"),
        ("HEADRACE_ENGINE_URL", "ftp://x"),
        ("HEADRACE_ENGINE_URL", "127.0.0.1:30000"),
        ("HEADRACE_ENGINE_URL", "http://"),
        ("HEADRACE_ENGINE_URL", "http://:30000"),
        ("HEADRACE_ENGINE_URL", "http://h:port"),
        ("HEADRACE_ENGINE_URL", "http://h:0"),
        ("HEADRACE_ENGINE_URL", "http://[::1"),
        ("HEADRACE_ENGINE_URL", "http://h ost"),
        ("HEADRACE_ENGINE_URL", "http://h\n"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert variable in message_of()


_TIMES = sorted(name for name in Settings.model_fields if name.endswith("_seconds"))


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e30", "2592001", "-1"])
@pytest.mark.parametrize("name", _TIMES)
def test_a_time_is_finite_and_at_most_30_days(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    variable = f"HEADRACE_{name.upper()}"
    monkeypatch.setenv(variable, value)
    assert variable in message_of()


def test_every_float_setting_is_a_time_or_a_share() -> None:
    floats = {name for name, field in Settings.model_fields.items() if field.annotation is float}
    assert floats == {*_TIMES, "mismatch_limit"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "https://engine.example/", "http://[::1]:30000", "http://h"])
def test_an_engines_url_is_taken_as_it_is(url: str) -> None:
    assert load_settings(engine_url=url).engine_url == url


@pytest.mark.parametrize("name", ["dump_dir", "quarantine_dir"])
def test_a_path_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(f'{name} = "a\\u0000b"\n')
    monkeypatch.setenv("HEADRACE_CONFIG", str(config))
    assert f"HEADRACE_{name.upper()}" in message_of()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HEADRACE_HEARTBEAT_SECONDS", "60", ("HEADRACE_SITE_TTL_SECONDS is 15", "3 times", "180 or more")),
        ("HEADRACE_SITE_TTL_SECONDS", "8", ("HEADRACE_SITE_TTL_SECONDS is 8", "9 or more")),
        ("HEADRACE_LEASE_CAPTURED_SECONDS", "8", ("HEADRACE_LEASE_CAPTURED_SECONDS is 8", "HEARTBEAT")),
        ("HEADRACE_LEASE_STORING_SECONDS", "8", ("HEADRACE_LEASE_STORING_SECONDS is 8", "HEARTBEAT")),
        ("HEADRACE_RESCAN_SECONDS", "10", ("HEADRACE_LEASE_GRACE_SECONDS is 20", "HEADRACE_RESCAN_SECONDS (10)")),
    ],
)
def test_settings_with_which_every_lease_would_lapse_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv(variable, value)
    for word in words:
        assert word in message_of()


def test_a_lease_of_three_renewals_is_enough() -> None:
    settings = load_settings(heartbeat_seconds=5, site_ttl_seconds=15, lease_captured_seconds=15)
    assert settings.lease_captured_seconds == 15


def test_a_wrong_secret_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_WINDOW", "hunter2")
    assert "hunter2" not in message_of()


def test_the_engines_own_variables_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE_THREADS", "4")
    monkeypatch.setenv("HEADRACE_CAPTURE_ANYTHING", "4")
    monkeypatch.setenv("UNRELATED", "4")
    load_settings()


@pytest.mark.parametrize("value", ["0", "1.01", "nan", "-0.5", "5%"])
def test_a_share_of_mismatches_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HEADRACE_MISMATCH_LIMIT", value)
    assert "HEADRACE_MISMATCH_LIMIT" in message_of()
