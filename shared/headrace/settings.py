"""Settings of every service: `HEADRACE_*` variables, `HEADRACE_*_FILE` for secrets, or a TOML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from headrace.errors import UsageError
from headrace.hints import nearest

PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"

_LONGEST = 30 * 86_400.0  # seconds: what takes longer is a mistake, and clocks and sockets overflow at some time
_MOST = 1 << 53  # Redis scripts count in doubles
Pause = Annotated[float, Field(ge=0, le=_LONGEST, allow_inf_nan=False)]
Seconds = Annotated[Pause, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=_MOST)]

# What is renewed, and by what: a lease or a registration must outlast two renewals that did not come.
_OUTLASTS = (
    ("site_ttl_seconds", "heartbeat_seconds"),
    ("lease_captured_seconds", "heartbeat_seconds"),
    ("lease_storing_seconds", "heartbeat_seconds"),
    ("lease_grace_seconds", "rescan_seconds"),
)
_RENEWALS = 3


class Settings(BaseSettings):
    """One table for all services; each reads what it needs. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", hide_input_in_errors=True)

    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_password: SecretStr = SecretStr("")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    health_host: str = "127.0.0.1"
    health_port: int = Field(default=0, ge=0, le=65535, description="0: no port for metrics and health")

    dump_dir: Path = Path("/dev/shm/headrace")
    rescan_seconds: Seconds = Field(default=1.0, description="how often the folder is read without an event")
    heartbeat_seconds: Seconds = Field(default=3.0, description="how often leases and registration are renewed")
    site_ttl_seconds: Seconds = 15.0

    engine_url: str = "http://127.0.0.1:30000"
    engine_timeout_seconds: Seconds = Field(default=600.0, description="of one /generate")
    canary_timeout_seconds: Seconds = 60.0
    max_requests: Count = Field(default=64, description="in flight to the engine")
    max_tokens: Count = Field(default=262_144, description="in flight to the engine")
    dump_cap_bytes: Count = Field(default=8 << 30, description="of the dump folder, promised ones included")
    orphan_grace_seconds: Seconds = Field(default=60.0, description="before a dump that nobody asked for goes")
    quarantine_dir: Path = Path("/var/tmp/headrace-quarantine")
    quarantine_bytes: int = Field(default=1 << 30, ge=0, le=_MOST, description="oldest refused dumps go first")

    window: Count = Field(default=1000, description="samples of a run that are fed and not done")
    reap_seconds: Seconds = 1.0
    mismatch_limit: float = Field(
        default=0.05, gt=0, le=1, allow_inf_nan=False, description="share of mismatches that pauses a run; 1: never"
    )
    mismatch_verdicts: Count = Field(default=50, description="over at least so many samples' first attempts")
    drain_seconds: Pause = Field(default=20.0, description="for requests in flight, after SIGTERM")

    lease_in_flight_seconds: Seconds = 30.0
    lease_grace_seconds: Seconds = Field(default=20.0, description="for the dump, after the HTTP answer")
    lease_captured_seconds: Seconds = 45.0
    lease_storing_seconds: Seconds = 60.0
    lease_record_seconds: Seconds = 30.0

    @field_validator("engine_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not _is_http(url):
            raise ValueError("give http://HOST:PORT or https://HOST:PORT")
        return url

    @field_validator("dump_dir", "quarantine_dir")
    @classmethod
    def _check_path(cls, path: Path) -> Path:
        if "\0" in str(path):
            raise ValueError("no path has a NUL")
        return path

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order: arguments, variables, `*_FILE` variables, the TOML file that `HEADRACE_CONFIG` names."""
        config = os.environ.get(CONFIG_VARIABLE)
        toml = (TomlConfigSettingsSource(settings_cls, Path(config)),) if config else ()
        return init_settings, env_settings, _FileVariables(settings_cls), *toml


class _FileVariables(PydanticBaseSettingsSource):
    """`HEADRACE_X_FILE=/path`: the value of X is that file's content without the trailing newline."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        path = os.environ.get(f"{PREFIX}{field_name.upper()}_FILE")
        if path is None:
            return None, field_name, False
        try:
            return Path(path).read_text().rstrip("\r\n"), field_name, False
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{PREFIX}{field_name.upper()}_FILE={path}: {error}") from error

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in found.items() if value is not None}


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False
    return whole and url.isprintable() and " " not in url


def load_settings(**overrides: Any) -> Settings:
    """Read the settings of this process.

    Raises:
        UsageError: a value is wrong, two do not go together, or a name is unknown; the message names it, and the
            nearest known one.
    """
    _check_config_file()
    _check_variables(os.environ)
    try:
        settings = Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UsageError(f"setting {name!r} is unknown{_nearest(name)}") from error
        raise UsageError(f"setting {name} ({PREFIX}{name.upper()}): {first['msg']}") from error
    except (ValueError, OSError) as error:  # a TOML file that does not parse, or cannot be read
        raise UsageError(f"{CONFIG_VARIABLE}={os.environ.get(CONFIG_VARIABLE)}: {error}") from error
    _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    """Refuse leases that lapse between two of their renewals: every sample would end as lapsed."""
    for lease, renewal in _OUTLASTS:
        least = _RENEWALS * getattr(settings, renewal)
        if getattr(settings, lease) < least:
            raise UsageError(
                f"{PREFIX}{lease.upper()} is {getattr(settings, lease):g}, less than {_RENEWALS} times "
                f"{PREFIX}{renewal.upper()} ({getattr(settings, renewal):g}): set it to {least:g} or more"
            )


def _check_config_file() -> None:
    config = os.environ.get(CONFIG_VARIABLE)
    if config and not Path(config).is_file():
        raise UsageError(f"{CONFIG_VARIABLE}={config}: there is no such file")


def _check_variables(environ: Mapping[str, str]) -> None:
    for variable in environ:
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or name.startswith(("engine_", "capture_")):
            continue  # the engine's and the plugin's own variables are theirs to check
        if name.removesuffix("_file") not in Settings.model_fields:
            raise UsageError(f"{variable} is not a setting{_nearest(name)}")


def _nearest(name: str) -> str:
    near = nearest(name.removesuffix("_file"), Settings.model_fields)
    return f"; did you mean {PREFIX}{near.upper()}?" if near else ""
