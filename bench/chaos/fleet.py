"""The processes: one of each service, a second writer and a second dispatcher, and what is done to them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from bench.chaos.schedule import twin
from headrace.bus import Bus
from headrace_cli.stack import SERVICES, Stack, StackConfig
from tests.support.pipeline import READY_SECONDS, make_stack, redis_log

SECOND = "-2"


class Fleet:
    """Two stacks over one Redis and one dump folder; a context manager that stops whatever runs."""

    def __init__(self, folder: Path, model: Path, engine: tuple[str, ...], environ: Mapping[str, str]) -> None:
        """Prepare the folders; nothing runs yet."""
        self.main = make_stack(folder / "stack", model, engine=engine, environ=environ)
        config = self.main.config
        self._second = Stack(
            StackConfig(
                folder=folder / "second",
                model=model,
                model_name=config.model_name,
                redis_url=self.main.redis_url,
                redis_password=(self.main.folder / "redis-password").read_text(),
                dump_dir=self.main.dump_dir,
                environ=config.environ,
            )
        )
        seconds = [second for name in SERVICES if (second := twin(name)) is not None]
        self.names = (*SERVICES, *seconds)
        self._frozen: set[str] = set()

    def start_all(self) -> Bus:
        """Start every process and wait until all are ready.

        Raises:
            Unavailable: one is not ready in time.
        """
        for name in self.names:
            self.start(name)
            if name == "redis":
                self.main.wait_ready(name, READY_SECONDS)
        self.wait_ready()
        return self.main.bus()

    def wait_ready(self) -> None:
        """Wait until every process is ready.

        Raises:
            Unavailable: one ended, or is not ready in time.
        """
        for name in self.names:
            stack, service = self._of(name)
            stack.wait_ready(service, READY_SECONDS)

    def start(self, name: str) -> None:
        """Start a process that does not run."""
        stack, service = self._of(name)
        stack.start(service)

    def kill(self, name: str) -> None:
        """kill -9, also of one that ended by itself."""
        stack, service = self._of(name)
        stack.kill(service)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        stack, service = self._of(name)
        os.kill(stack.pid(service), signal.SIGSTOP)
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        stack, service = self._of(name)
        os.kill(stack.pid(service), signal.SIGCONT)
        self._frozen.discard(name)

    def ready(self, name: str) -> bool:
        """Whether a process that runs says that it is ready."""
        stack, service = self._of(name)
        return stack.ready(service)

    def ended(self) -> dict[str, int]:
        """Processes that ended by themselves, with their exit codes."""
        second = {f"{name}{SECOND}": code for name, code in self._second.ended().items()}
        return {**self.main.ended(), **second}

    def tail(self, name: str, lines: int) -> str:
        """The last lines of a process's log."""
        stack, service = self._of(name)
        return stack.tail(service, lines)

    def copy_redis(self, place: Path) -> bool:
        """Copy what Redis appended so far; False when it was rewriting that just now."""
        try:
            shutil.copytree(redis_log(self.main), place)
        except shutil.Error:
            shutil.rmtree(place, ignore_errors=True)
            return False
        return True

    def replace_redis(self, earlier: Path | None) -> None:
        """Put an earlier copy in the place of what Redis knew, or nothing; Redis does not run."""
        shutil.rmtree(redis_log(self.main))
        if earlier is not None:
            earlier.rename(redis_log(self.main))

    def stop(self) -> dict[str, int]:
        """Stop all in order, those of the second stack first. Returns the exit codes."""
        for name in list(self._frozen):
            self.thaw(name)
        second = {f"{name}{SECOND}": code for name, code in self._second.stop().items()}
        return {**second, **self.main.stop()}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._frozen):
            self.thaw(name)  # one that stands still would not end
        with self.main, self._second:
            pass

    def _of(self, name: str) -> tuple[Stack, str]:
        return (self._second, name.removesuffix(SECOND)) if name.endswith(SECOND) else (self.main, name)
