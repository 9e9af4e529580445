"""The hits of a fault plan: chosen when a request arrives, and written down, so that they count over crashes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from headrace import logs
from headrace.errors import InvalidId, Unavailable, UsageError
from headrace.ids import RequestId
from headrace_engine.faults.plan import Fault, Plan, Tally, load_plan

_log = logs.get(__name__)


class Hits:
    """A plan at work: which of the requests of this boot go wrong. Thread-safe.

    Each hit is a line of JSON in the file `{plan}.jsonl` before it acts: the fault's index, its kind, the request and
    the boot. An engine that starts counts the lines of earlier boots. Two engines need a copy of the plan each.

    Raises:
        UsageError: the plan or the file of its hits cannot be read, or the hits are another plan's.
    """

    def __init__(self, path: Path | None) -> None:
        """Take up the plan at `path`; without one nothing goes wrong."""
        self.plan = Plan() if path is None else load_plan(path)
        self._lock = threading.Lock()
        self._tally = Tally()
        self._chosen: dict[str, Fault] = {}
        if path is not None:
            self._path = path.with_name(f"{path.name}.jsonl")
            self._read()
            kinds = [fault.kind.value for fault in self.plan.faults]
            _log.warning("FAULTS WILL BE PROVOKED: this engine is for tests", plan=str(path), kinds=kinds)

    def choose(self, rid: str, boot: str) -> Fault | None:
        """Decide how a request that arrives goes wrong, and write it down; None if it is to go well.

        Raises:
            Unavailable: the hit cannot be written.
        """
        if not self.plan.faults:
            return None
        try:
            request = RequestId.parse(rid)
        except InvalidId:
            return None
        with self._lock:
            fault = None if rid in self._chosen else self.plan.choose(request, self._tally)
            if fault is None:
                return None
            entry = {"fault": fault.index, "kind": fault.kind.value, "request": rid, "boot": boot}
            try:
                with self._path.open("ab", buffering=0) as file:
                    file.write(json.dumps(entry).encode() + b"\n")
            except OSError as error:
                raise Unavailable(f"{self._path}: {error.strerror}; a fault is written down before it acts") from error
            self._tally.add(fault.index, request)
            self._chosen[rid] = fault
        _log.warning("fault", fault=fault.index, kind=fault.kind.value, request=rid)
        return fault

    def of(self, rid: str) -> Fault | None:
        """The fault that was chosen for a request of this boot, or None."""
        return self._chosen.get(rid)

    def _read(self) -> None:
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            whole = data.rfind(b"\n") + 1
            if whole < len(data):  # the engine was killed while it wrote
                os.truncate(self._path, whole)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}; the hits of a fault plan lie beside it") from error
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                index, request = entry["fault"], RequestId.parse(entry["request"])
                known = 0 <= index < len(self.plan.faults) and self.plan.faults[index].kind == entry["kind"]
            except (ValueError, TypeError, KeyError, InvalidId) as error:
                raise UsageError(f"{self._path}: line {number} is no hit ({error}); remove the file") from error
            if not known:
                raise UsageError(f"{self._path}: line {number} is of another plan; remove the file")
            self._tally.add(index, request)
