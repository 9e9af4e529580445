"""The engine's settings: HEADRACE_ENGINE_* variables, or flags, which win."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from headrace.errors import UsageError
from headrace.settings import PREFIX as SHARED_PREFIX
from headrace.settings import Settings

SMOLLM2 = "smollm2"
PREFIX = "HEADRACE_ENGINE_"


def _half_the_cores() -> int:
    # The services beside the engine need some, and torch's threads wait for one another at every layer: on 2 cores
    # shared with others, SmolLM2 made 303 tokens/s with one thread and 82 with two.
    return max(1, (os.cpu_count() or 2) // 2)


class EngineSettings(BaseSettings):
    """A CPU engine that speaks the part of SGLang's HTTP interface that headrace uses."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, protected_namespaces=(), env_parse_none_str="none"
    )

    model: str = Field(default=SMOLLM2, min_length=1, description="a checkpoint folder, or the word smollm2")
    model_name: str = Field(default="", description="what the model is called in dumps; the model option if empty")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=30000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    port_file: Path | None = Field(default=None, description="file to write the chosen port to")
    boundaries: str = Field(default="eagle3", description="eagle3 (2, L//2, L-3), or numbers such as 2,15,27")
    final_state: Literal["pre_norm", "post_norm"] = Field(
        default="pre_norm", description="final norm's input or output"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="of weights and states")
    chunk_tokens: int = Field(default=512, ge=1, description="prompt tokens a step computes at most")
    max_running: int = Field(default=32, ge=1, description="requests in a step at most")
    max_queued: int = Field(default=1024, ge=1, description="requests in flight at most; more get a 503")
    prefix_cache: int = Field(
        default=0, ge=0, description="prompt tokens kept for prompts that begin alike; 0 keeps none"
    )
    context_length: int | None = Field(default=None, ge=8, description="shorter than the model's own, if set")
    threads: int = Field(default=_half_the_cores(), ge=1, description="torch threads; half the cores if not set")
    weight_version: str = Field(default="default", min_length=1, description="names the weights in dumps")
    faults: Path | None = Field(default=None, description="for tests alone: a plan of faults to provoke")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="of the lines on stderr"
    )
    log_format: Literal["json", "console"] = Field(default="json", description="of the lines on stderr")

    @property
    def name(self) -> str:
        """What the engine calls its model."""
        return self.model_name or self.model


def load_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> EngineSettings:
    """Read flags, then the environment.

    Raises:
        UsageError: a value, a flag or a variable's name is wrong; the message names it in one line.
    """
    for variable in environ:
        known = variable.removeprefix(PREFIX).lower() in EngineSettings.model_fields
        shared = variable.removeprefix(SHARED_PREFIX).lower() in Settings.model_fields  # HEADRACE_ENGINE_URL
        if variable.startswith(PREFIX) and not known and not shared:
            raise UsageError(f"{variable} is not a setting of the engine; see --help")
    try:
        settings = EngineSettings(
            _cli_parse_args=list(arguments),
            _cli_prog_name="headrace-engine",
            _cli_kebab_case=True,
            _cli_exit_on_error=False,
        )
    except ValidationError as error:
        first = error.errors()[0]
        option = "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise UsageError(f"option --{option}: {first['msg']}, got {first.get('input')!r}; see --help") from error
    except SettingsError as error:
        raise UsageError(f"{error}; see --help") from error
    if settings.model != SMOLLM2 and not Path(settings.model, "config.json").is_file():
        raise UsageError(
            f"option --model: {settings.model} holds no config.json; give a checkpoint folder, or {SMOLLM2}"
        )
    return settings
