"""Reads a run file: one `[run]` table of TOML, checked whole, every fault told in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.boundaries import EAGLE3, check_ascending, resolve_boundaries
from headrace.errors import UsageError
from headrace.formats import FormatNeeds
from headrace.hints import did_you_mean
from headrace.ids import check_run_name

MaskRule = Literal["assistant", "last_assistant", "all"]
FinalState = Literal["pre_norm", "post_norm"]
# A request id has nine digits for its tokens.
_LONGEST = 999_999_999


class _Table(BaseModel):
    """The `[run]` table as written; each description completes the sentence "give ..."."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = Field(description="1 to 24 of the characters a-z and 0-9")
    data: str | list[str] = Field(min_length=1, description="the path of a JSONL file, or a list of such paths")
    output: str = Field(min_length=1, description="the folder of the dataset")
    model: str = Field(min_length=1, description="a checkpoint folder or the word of a known model")
    engine_model: str | None = Field(default=None, min_length=1, description="the name that the engine gives its model")
    boundaries: Literal["eagle3"] | list[int] = Field(
        default="eagle3", min_length=1, description='"eagle3" or an ascending list of whole numbers'
    )
    final_state: FinalState = Field(default="pre_norm", description='"pre_norm" or "post_norm"')
    format: str = Field(default="headrace", min_length=1, description="the name of an output format")
    max_length: int = Field(default=4096, ge=1, le=_LONGEST, description="a whole number of tokens, at least 1")
    max_attempts: int = Field(default=3, ge=1, description="a whole number, at least 1")
    chat_template: str | None = Field(default=None, min_length=1, description="the path of a jinja file")
    mask: MaskRule = Field(default="assistant", description='"assistant", "last_assistant" or "all"')
    trust_remote_code: bool = Field(default=False, description="true or false")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run as its file asks for it: paths are absolute, the model's word and `eagle3` are still as written.

    `max_length` is in tokens: a longer sample is rejected, never cut. `mask` says which tokens of a conversation
    are trained; a sample that brings its own loss mask keeps it. `boundaries` is `eagle3` or ascending ints.
    """

    path: Path
    name: str
    data: tuple[Path, ...]
    output: Path
    model: str
    engine_model: str
    boundaries: Literal["eagle3"] | tuple[int, ...]
    final_state: FinalState
    format: str
    max_length: int
    max_attempts: int
    chat_template: Path | None
    mask: MaskRule
    trust_remote_code: bool

    def model_folder(self, resolve_model: Callable[[str], Path | None]) -> Path:
        """The checkpoint's absolute folder.

        `resolve_model` maps the word of a known model to its folder, anything else to None: then the model is a
        path, relative to the run file's folder.

        Raises:
            UsageError: the model cannot be a path.
        """
        known = resolve_model(self.model)
        return _absolute(self.path, "model", self.model) if known is None else known.resolve()

    def check_format(self, known_formats: Mapping[str, FormatNeeds]) -> str:
        """Return the format's name; `known_formats` has for each what it is made from.

        Raises:
            UsageError: the format is not known, or cannot be made from the run's final state and boundaries.
        """
        needs = known_formats.get(self.format)
        where = f"{self.path}: run.format = {self.format!r}"
        if needs is None:
            hint = did_you_mean(self.format, known_formats)
            raise UsageError(f"{where} is no known format{hint}; known are {', '.join(sorted(known_formats))}")
        if self.final_state not in needs.takes:
            takes = " or ".join(map(repr, sorted(needs.takes)))
            raise UsageError(f"{where} is made from {takes}; set run.final_state to it, not {self.final_state!r}")
        if needs.boundaries and self.boundaries != EAGLE3 and len(self.boundaries) != needs.boundaries:
            raise UsageError(
                f"{where} is made from {needs.boundaries} boundaries; give run.boundaries so many, or {EAGLE3!r}, not "
                f"{list(self.boundaries)}"
            )
        return self.format

    def resolve_boundaries(self, layers: int) -> tuple[int, ...]:
        """The boundaries for a model of `layers` decoder layers.

        Raises:
            UsageError: the model does not have them.
        """
        try:
            return resolve_boundaries(self.boundaries, layers)
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from error


def load_run_file(path: Path) -> RunFile:
    """Read a run file; relative paths in it are relative to its folder.

    Raises:
        UsageError: it is missing, not TOML, or a key is unknown, missing or of a wrong value.
    """
    # Not resolved: a mounted configuration is a link, and paths are relative to where it seems to be.
    path = path.absolute()
    table = _read_table(path)
    try:
        run = _Table.model_validate(table)
        check_run_name(run.name)
        if not isinstance(run.boundaries, str):
            check_ascending(run.boundaries)
    except ValidationError as error:
        raise UsageError(f"{path}: {'; '.join(_faults(error, table))}") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    data = [run.data] if isinstance(run.data, str) else run.data
    return RunFile(
        path=path,
        name=run.name,
        data=tuple(_absolute(path, "data", entry) for entry in data),
        output=_absolute(path, "output", run.output),
        model=run.model,
        engine_model=run.model if run.engine_model is None else run.engine_model,
        boundaries=run.boundaries if isinstance(run.boundaries, str) else tuple(run.boundaries),
        final_state=run.final_state,
        format=run.format,
        max_length=run.max_length,
        max_attempts=run.max_attempts,
        chat_template=None if run.chat_template is None else _absolute(path, "chat_template", run.chat_template),
        mask=run.mask,
        trust_remote_code=run.trust_remote_code,
    )


def _read_table(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a run file that can be read") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise UsageError(f"{path}: not TOML: {error}; mend the file") from error
    table = document.get("run")
    if not isinstance(table, dict):
        raise UsageError(f"{path}: no [run] table; put the keys of the run below a line [run]")
    if extra := sorted(set(document) - {"run"}):
        hint = did_you_mean(extra[0], _Table.model_fields)
        raise UsageError(f"{path}: {extra[0]!r} is outside the [run] table{hint}; move or remove it")
    return table


def _faults(error: ValidationError, table: dict[str, Any]) -> Iterable[str]:
    """One phrase a key: a union reports each of its members, so the first report of a key stands for all."""
    seen = set()
    for fault in error.errors(include_url=False):
        key = str(fault["loc"][0])
        if key in seen:
            continue
        seen.add(key)
        if fault["type"] == "extra_forbidden":
            yield f"run.{key} is an unknown key{did_you_mean(key, _Table.model_fields)}"
            continue
        help_text = _Table.model_fields[key].description
        if fault["type"] == "missing":
            yield f"run.{key} is missing: give {help_text}"
        else:
            yield f"run.{key} = {str(table[key])[:80]!r}: give {help_text}"


def _absolute(run_file: Path, key: str, text: str) -> Path:
    """The path of a key's value, relative to the run file's folder."""
    try:
        path = (run_file.parent / Path(text).expanduser()).resolve()
        str(path).encode()
        return path
    except UnicodeEncodeError as error:  # the names of folders are bytes, Redis and the books of a run are text
        message = f"{run_file}: run.{key} = {text[:80]!r} is below a folder whose name is no UTF-8 text; rename it"
        raise UsageError(message) from error
    except (ValueError, RuntimeError) as error:  # a NUL; the home of a user who is none, a loop of links
        fault = str(error).rstrip(".")
        raise UsageError(f"{run_file}: run.{key} = {text[:80]!r}: {fault}; give a path that can be") from error
