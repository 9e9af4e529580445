"""`headrace doctor`: looks at every part that is reachable, has an engine prove itself, and says what to change."""

from __future__ import annotations

from headrace_cli.doctor.diagnosis import Options, diagnose
from headrace_cli.doctor.findings import Finding, conclude
from headrace_cli.doctor.surroundings import examine

__all__ = ["Finding", "Options", "conclude", "diagnose", "examine"]
