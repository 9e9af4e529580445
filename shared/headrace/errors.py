"""Every error that headrace raises on purpose, with its exit code."""

from __future__ import annotations


class HeadraceError(Exception):
    """Something went wrong; the message names the thing and the next step."""

    exit_code = 1


class UsageError(HeadraceError):
    """The input, a run file or an option is wrong; mend it and call again."""

    exit_code = 2


class UnknownRun(UsageError):
    """Redis knows no run of this name; mend the name, or submit its run file again."""


class Unavailable(HeadraceError):
    """Redis, an engine or a folder cannot be used now; the same call may succeed later."""

    exit_code = 3


class RedisAway(Unavailable):
    """Redis cannot be used now, which is no run's fault; the same call may succeed later."""


class Conflict(HeadraceError):
    """The place belongs to another run, spec or process; choose another place or the first one's run file."""

    exit_code = 4


class VerificationFailed(HeadraceError):
    """Rows or books are wrong; the report above names each."""

    exit_code = 5


class RunIncomplete(HeadraceError):
    """The run ended with samples that are neither stored nor accounted for."""

    exit_code = 6


class IllegalTransition(HeadraceError):
    """A change was asked for that the state does not allow."""


class Unreadable(HeadraceError):
    """A file is torn, of an unknown schema, or not what its name says."""


class InvalidId(HeadraceError):
    """A request id does not have the form hr-{run}-{ordinal}-{nonce}-{tokens}-{digest}."""
