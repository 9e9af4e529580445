"""Keeps the model's final norm in the dataset, so that post-norm follows from it when no engine is there any more."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from headrace import logs
from headrace.dumpfolder import read_card, read_norm
from headrace.dumps import ENGINE_FILE
from headrace.errors import Unavailable, Unreadable, UsageError
from headrace.finalnorm import NORM_FILE, FinalNorm, declared_norm, norm_file
from headrace.runs import Identity, RunSpec
from headrace_writer.destination import Destination, guard

log = logs.get(__name__)


class NormKeeper:
    """The final norm of one run: the engine's while the dataset has none, and the dataset's from then on.

    A norm is the run's if it has the digest in the identity's fingerprint, whoever holds it and whichever boot is there
    now.
    """

    def __init__(self, destination: Destination, spec: RunSpec) -> None:
        """Keep it in this dataset."""
        self._destination = destination
        self._spec = spec
        self._norm: FinalNorm | None = None
        self._said = ""  # why there is none, logged once

    def find(self, dump_dir: Path, identity: Identity) -> FinalNorm | None:
        """The final norm of the engine and weights that make the run's rows, from now on in the dataset, too.

        `dump_dir` is where the engine declares itself. None where the rows are made without and there is none.

        Raises:
            UsageError: the rows need it, and the engine published none, or one of another width.
            Unavailable: the rows need it, and no engine with it is there now; or the folder cannot be used.
            Unreadable: the rows need it, and the dataset's own is damaged or another; or the engine's is.
            DestinationFull: no room to keep it.
        """
        digest = declared_norm(identity.engine)
        if self._norm is not None and self._norm.digest == digest:
            return self._norm
        if digest is None and not self._spec.needs_norm:
            return None
        try:
            self._norm = self._find(dump_dir, digest)
        except (Unavailable, Unreadable, UsageError) as error:
            if self._spec.needs_norm:
                raise
            if self._said != str(error):
                self._said = str(error)
                log.warning("no final norm beside the rows, which are made without", reason=self._said)
            return None
        return self._norm

    def _find(self, dump_dir: Path, digest: str | None) -> FinalNorm:
        if digest is None:
            raise UsageError(f"the engine publishes no final norm, {self._without_norm()}")
        kept = self._kept(digest)
        norm = kept or _published(dump_dir, digest)
        if norm.hidden_size != self._spec.hidden_size:
            widths = f"of width {norm.hidden_size}, the run's states are of width {self._spec.hidden_size}"
            raise UsageError(f"the engine publishes a final norm {widths}: it is not the one {self._without_norm()}")
        if kept is not None:
            return kept
        data = norm.encode()
        self._destination.publish(PurePosixPath(NORM_FILE), lambda file: file.write(data))
        # Another writer may have been first.
        return self._kept(digest) or norm

    def _without_norm(self) -> str:
        spec = self._spec
        return (
            f"which format {spec.format!r} needs with {spec.final_state!r}; serve the model with one that does, or "
            f"capture {spec.stored_state!r} in a run of another name"
        )

    def _kept(self, digest: str) -> FinalNorm | None:
        """What the dataset has; raises Unreadable if it is damaged or not the run's."""
        place = self._destination.folder / NORM_FILE
        with guard(place):
            try:
                norm = read_norm(place)
                if norm.digest != digest:
                    raise Unreadable(f"not the final norm of the run's engine: it is {norm.digest}, expected {digest}")
            except FileNotFoundError:
                return None
            except Unreadable as error:
                raise Unreadable(f"{place}: {error}; remove it, then resume: the engine's takes its place") from error
            return norm


def _published(dump_dir: Path, digest: str) -> FinalNorm:
    """What an engine publishes.

    Raises:
        Unavailable: no engine with this norm declares itself now.
        Unreadable: what it publishes is damaged, or not what it declares.
    """
    try:
        card = read_card(dump_dir / ENGINE_FILE)
        place = dump_dir / norm_file(card.boot)
        if declared_norm(card.fingerprint) != digest:
            gone = f"the final norm {digest} is gone with the engine that made the dump"
            raise Unavailable(f"{gone}: {card.fingerprint!r} is there now; bring it back")
    except (OSError, Unreadable) as error:
        raise _none_yet(dump_dir, error) from error
    try:
        norm = read_norm(place)
        if norm.digest != digest:
            raise Unreadable(f"not the final norm that the engine declares: it is {norm.digest}, expected {digest}")
    except OSError as error:
        raise _none_yet(dump_dir, error) from error
    except Unreadable as error:
        raise Unreadable(f"{place}: {error}; start the engine again, which writes it anew, then resume") from error
    return norm


def _none_yet(dump_dir: Path, error: Exception) -> Unavailable:
    return Unavailable(f"no final norm in {dump_dir}: {error}; is the engine starting?")


def require_torch(spec: RunSpec) -> None:
    """Raise UsageError where rows of the run are made with the final norm, and this writer's torch cannot do it."""
    if not spec.needs_norm:
        return
    needs = f"format {spec.format!r} needs torch in every writer where {spec.final_state!r} is captured"
    try:
        import torch  # noqa: F401

        from headrace_writer.formats.rmsnorm import check_torch

        check_torch()
    except Exception as error:  # what is half installed, or fits not the rest, raises anything
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            mend = "install it with: pip install 'headrace[trainers]', then"
        else:  # what was imported of it stays in this process
            mend = "mend it with: pip install --force-reinstall torch, start the writer again, then"
        raise UsageError(f"{needs} ({cause}); {mend}: headrace resume {spec.run}") from error
