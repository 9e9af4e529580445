"""`headrace verify`: checks a dataset without trusting the pipeline that made it."""

from __future__ import annotations

from headrace.extras import needs_extra

# Torch and transformers are only imported when states are recomputed.
with needs_extra("verify"):
    from headrace_cli.verify.problems import Kind, Problem
    from headrace_cli.verify.report import Ranks, Recomputed, Report, Worst, render
    from headrace_cli.verify.verification import verify

__all__ = ["Kind", "Problem", "Ranks", "Recomputed", "Report", "Worst", "render", "verify"]
