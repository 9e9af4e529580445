"""Keeps the model's final norm in the dataset, so that post-norm follows from it when no engine is there any more."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from headrace.dumpfolder import read_card, read_norm
from headrace.dumps import ENGINE_FILE
from headrace.errors import Conflict, Unavailable, Unreadable, UsageError
from headrace.finalnorm import NORM_FILE, FinalNorm
from headrace.formats import FORMATS
from headrace.runs import Identity, RunSpec
from headrace_writer.destination import Destination, guard


class NormKeeper:
    """The final norm of one run: the engine's while the dataset has none, and the dataset's from then on."""

    def __init__(self, destination: Destination, spec: RunSpec) -> None:
        """Keep it in this dataset."""
        self._destination = destination
        self._spec = spec
        self._needed = FORMATS[spec.format].needs_norm(spec.final_state)
        self._norm: FinalNorm | None = None
        # What the card said that was looked at last: another boot may publish another norm under the same names.
        self._seen: tuple[tuple[int, int, int], FinalNorm | None] | None = None

    def find(self, dump_dir: Path, identity: Identity) -> FinalNorm | None:
        """The final norm of the engine and weights that make the run's rows, from now on in the dataset, too.

        `dump_dir` is where the engine declares itself. None where the rows are made without and there is none.

        Raises:
            Conflict: the engine publishes another one than the dataset has.
            UsageError: the rows need it, and the engine publishes none.
            Unavailable: the rows need it, and no engine of this identity is there now; or the folder cannot be used.
            Unreadable: the dataset's own is damaged; or the rows need one, and the engine's is.
        """
        if self._norm is None:
            self._norm = self._kept()
        try:
            published = self._published(dump_dir, identity)
        except (Unavailable, Unreadable):
            if self._needed and self._norm is None:
                raise
            return self._norm
        if published is not None and self._norm is None:
            data = published.encode()
            self._destination.publish(PurePosixPath(NORM_FILE), lambda file: file.write(data))
            # Another writer may have been first.
            self._norm = self._kept() or published
        if published not in (None, self._norm):
            raise Conflict(
                f"the engine's final norm is not that of {self._destination.folder / NORM_FILE}: other weights under "
                "the same name and version; bring the engine back as it was, or start a run of another name"
            )
        if self._needed and self._norm is None:
            raise UsageError(
                f"the engine publishes no final norm, which format {self._spec.format!r} needs with "
                f"{self._spec.final_state!r}; serve the model with one that does, or capture "
                f"{FORMATS[self._spec.format].stores!r} in a run of another name"
            )
        return self._norm

    def _published(self, dump_dir: Path, identity: Identity) -> FinalNorm | None:
        """What the engine publishes.

        Raises:
            Unavailable: no engine of this identity declares itself now.
            Unreadable: what it publishes is damaged.
        """
        try:
            found = (dump_dir / ENGINE_FILE).stat(follow_symlinks=False)
            stamp = (found.st_dev, found.st_ino, found.st_mtime_ns)
            if self._seen is not None and self._seen[0] == stamp:
                return self._seen[1]
            card = read_card(dump_dir / ENGINE_FILE)
            if Identity(engine=card.fingerprint, weight_version=card.weight_version) != identity:
                raise Unavailable(f"the final norm of {identity.engine!r} is gone with that engine; bring it back")
        except (OSError, Unreadable) as error:
            raise _none_yet(dump_dir, error) from error
        try:
            norm = read_norm(dump_dir / card.norm_file) if card.norm_file else None
        except OSError as error:
            raise _none_yet(dump_dir, error) from error
        except Unreadable as error:
            place = dump_dir / card.norm_file
            raise Unreadable(f"{place}: {error}; start the engine again, which writes it anew, then resume") from error
        if norm is not None and norm.hidden_size != self._spec.hidden_size:
            norm = None
        self._seen = stamp, norm
        return norm

    def _kept(self) -> FinalNorm | None:
        place = self._destination.folder / NORM_FILE
        with guard(place):
            try:
                norm = read_norm(place)
                if norm.hidden_size != self._spec.hidden_size:
                    raise Unreadable(f"a weight of width {norm.hidden_size}, the run has {self._spec.hidden_size}")
            except FileNotFoundError:
                return None
            except Unreadable as error:
                raise Unreadable(f"{place}: {error}; remove it, then resume: the engine's takes its place") from error
            return norm


def _none_yet(dump_dir: Path, error: Exception) -> Unavailable:
    return Unavailable(f"no final norm in {dump_dir}: {error}; is the engine starting?")


def require_torch(spec: RunSpec) -> None:
    """Raise UsageError where rows of the run are made with the final norm, and this writer's torch cannot do it."""
    if not FORMATS[spec.format].needs_norm(spec.final_state):
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
