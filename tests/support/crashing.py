"""Services that kill themselves in the gap between two of their steps, once, and serve as usual when started again."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_cli.stack import Stack

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The service kills itself (kill -9) before the `at`-th call of `target`, `module:name` or `module:Class.name`.

    Of that call's arguments `note` is left in the file of this name. With `copy`, (file or folder, copy, call), a copy
    is made before an earlier call: what the service's store knew then.
    """

    service: str
    target: str
    at: int
    note: str
    copy: tuple[str, str, int] | None = None


class CrashingStack(Stack):
    """A stack that starts one service with a crash ahead of it, as long as `crash` is set."""

    crash: Crash | None = None

    def wait_crash(self, timeout: float) -> str:
        """Wait until the service killed itself; it is then not started. Returns the note of the last call."""
        assert self.crash is not None
        process = self._processes[self.crash.service]
        code = process.wait(timeout)
        assert code == -signal.SIGKILL, f"code {code}: {self.tail(self.crash.service)}"
        del self._processes[self.crash.service]
        note = Path(self.crash.note).read_text()
        self.crash = None
        return note

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        command, environ = super()._command(name)
        if self.crash is not None and name == self.crash.service:
            prelude = f"from tests.support.crashing import Crash, arm; arm({self.crash!r}); "
            command = [*command[:2], prelude + command[2], *command[3:]]
            environ = {**environ, "PYTHONPATH": str(_ROOT)}
        return command, environ


def arm(crash: Crash) -> None:
    """Wrap the crash's target in this process."""
    module, _, path = crash.target.partition(":")
    *outer, name = path.split(".")
    place: Any = importlib.import_module(module)
    for part in outer:
        place = getattr(place, part)
    setattr(place, name, _crashing(getattr(place, name), crash))


def _crashing(function: Callable[..., Any], crash: Crash) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if crash.copy is not None and number == crash.copy[2]:
            shutil.copytree(crash.copy[0], crash.copy[1])
        if number == crash.at:
            Path(crash.note).write_text(repr((args, kwargs)))
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call
