"""Every metric, named once; no request id, path or prompt is ever a label."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from headrace.verdicts import LOSSES, MISMATCHES

QUEUE_DEPTH = Gauge("headrace_queue_depth", "Items waiting in a queue", ["queue"])
REQUESTS = Counter("headrace_requests_total", "Requests by what the engine answered", ["run", "outcome"])
VERDICTS = Counter("headrace_verdicts_total", "Dumps judged: matches and mismatches", ["run"])
MATCH_FAILURES = Counter("headrace_match_failures_total", "Dumps refused, by reason", ["run", "reason"])
DUPLICATES = Counter("headrace_duplicates_total", "Dumps of samples of which another request was captured", ["run"])
LAPSES = Counter("headrace_lapses_total", "Attempts whose lease lapsed, by reason", ["run", "reason"])
LOSSES_TOTAL = Counter("headrace_losses_total", "Requests whose states the engine could not publish", ["reason"])
ROWS_STORED = Counter("headrace_rows_stored_total", "Rows whose manifest line was written", ["run"])
TOKENS_STORED = Counter("headrace_tokens_stored_total", "Tokens of stored rows", ["run"])
BYTES_STORED = Counter("headrace_bytes_stored_total", "Bytes of stored rows", ["run"])
IN_FLIGHT_TOKENS = Gauge("headrace_in_flight_tokens", "Tokens that hold a credit", ["site"])
DUMP_DIR_BYTES = Gauge("headrace_dump_dir_bytes", "Bytes in the dump folder", ["site"])
STAGE_SECONDS = Histogram(
    "headrace_stage_seconds",
    "Time of one sample in a stage",
    ["stage"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
RUN_PAUSED = Gauge("headrace_run_paused", "1 while the run is paused", ["run"])
SITE_UP = Gauge("headrace_site_up", "1 while the site is registered", ["site"])
BREAKER_OPEN = Gauge("headrace_breaker_open", "1 while an engine that failed gets no requests", ["site"])

STAGES = ("request", "judge", "store")
LAPSED = ("lapsed", "no_dump", "dump_gone")
OUTCOMES = ("answered", "refused", "unavailable", "timeout", "dropped")

for _stage in STAGES:
    STAGE_SECONDS.labels(_stage)
for _reason in sorted(LOSSES):
    LOSSES_TOTAL.labels(_reason)


def see_run(run: str) -> None:
    """Create every child of a run, so that a rate exists before the first failure does."""
    VERDICTS.labels(run)
    DUPLICATES.labels(run)
    ROWS_STORED.labels(run)
    TOKENS_STORED.labels(run)
    BYTES_STORED.labels(run)
    for reason in sorted(MISMATCHES):
        MATCH_FAILURES.labels(run, reason)
    for lapse in LAPSED:
        LAPSES.labels(run, lapse)
    for outcome in OUTCOMES:
        REQUESTS.labels(run, outcome)
