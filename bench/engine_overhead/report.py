"""What is printed and recorded: a line for each measurement, a table of medians, JSON lines."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from bench.engine_overhead.course import OFF, ON, REFERENCE, Measurement
from headrace.capturestats import CaptureStats

_MODES = (REFERENCE, OFF, ON)

_OF_ALL: tuple[tuple[str, Callable[[Measurement], float | None]], ...] = (
    ("tokens/s", lambda m: m.speed),
    ("scheduler CPU, s per 1000 tokens", lambda m: 1000 * m.cpu.schedulers / m.sent.tokens),
    ("CPU of all processes, s per 1000 tokens", lambda m: 1000 * m.cpu.all / m.sent.tokens),
    ("states published, GB/s", lambda m: m.bandwidth / 1e9 if m.taken else None),
    ("requests published / sent", lambda m: m.taken.published / m.requests if m.taken else None),
)
# Since the server's start, or of its latest 1024 forwards: the warm-up is part of both.
_OF_PLUGIN: tuple[tuple[str, Callable[[CaptureStats], float]], ...] = (
    ("scheduler thread per forward, ms, p50", lambda stats: stats.forward_ms_p50),
    ("scheduler thread per forward, ms, p99", lambda stats: stats.forward_ms_p99),
    ("scheduler thread per forward, ms, max", lambda stats: stats.forward_ms_max),
    ("all waits for room in the buffer, ms", lambda stats: stats.waited_ms),
    ("pinned host memory, MiB", lambda stats: stats.pinned_bytes / (1 << 20)),
    ("device memory, MiB", lambda stats: stats.device_bytes / (1 << 20)),
)


def line(measured: Measurement) -> str:
    """One measurement in one line."""
    cpu = measured.cpu
    words = [
        f"{measured.repetition} {measured.mode:9}",
        f"{measured.speed:9.0f} tokens/s in {measured.sent.seconds:6.2f} s",
        f"CPU {cpu.schedulers:6.2f} s scheduler, {cpu.all:6.2f} s all",
    ]
    if measured.taken is not None:
        taken = measured.taken
        late = max(0.0, taken.last - measured.sent.began - measured.sent.seconds)
        words.append(f"{measured.bandwidth / 1e9:5.2f} GB/s, {taken.published}/{measured.requests} published")
        words.append(f"the last {late:.2f} s after its answer, {taken.checksums} checksums equal")
    if measured.statistics is not None:
        stats = measured.statistics
        words.append(f"scheduler thread {stats.forward_ms_p50:.2f} ms a forward, p99 {stats.forward_ms_p99:.2f}")
    return "; ".join([*words, *measured.problems])


def as_json(measured: Measurement) -> str:
    """The same for a machine."""
    derived = {"tokens_per_second": measured.speed, "state_bytes_per_second": measured.bandwidth}
    return json.dumps({**asdict(measured), **derived, "problems": measured.problems})


def table(measurements: Sequence[Measurement]) -> str:
    """Medians of the repetitions, as Markdown; a ratio is the median of those of the repetitions, which follow."""
    modes = [mode for mode in _MODES if any(measured.mode == mode for measured in measurements)]
    lines = [f"| median of {1 + max(m.repetition for m in measurements)} | {' | '.join(modes)} |"]
    lines.append("|---|" + "---:|" * len(modes))
    for name, value in _OF_ALL:
        cells = [_median([value(m) for m in measurements if m.mode == mode]) for mode in modes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, of_plugin in _OF_PLUGIN:
        cells = [
            _median([of_plugin(m.statistics) for m in measurements if m.mode == mode and m.statistics])
            for mode in modes
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"on/off {_ratio(measurements, ON, OFF)}"]
    if REFERENCE in modes:
        lines += [f"off/reference {_ratio(measurements, OFF, REFERENCE)}"]
        lines += [f"on/reference {_ratio(measurements, ON, REFERENCE)}"]
    lost: Counter[str] = Counter()
    for measured in measurements:
        lost.update(measured.taken.lost if measured.taken else {})
    lines += [f"lost {dict(lost) or 'none'}, wrong {sum(m.taken.wrong for m in measurements if m.taken)}"]
    return "\n".join(lines)


def ratios(measurements: Iterable[Measurement], over: str, under: str) -> list[float]:
    """Speeds of a mode over those of another, repetition by repetition."""
    speeds = {(measured.mode, measured.repetition): measured.speed for measured in measurements}
    pairs = [(speed, speeds.get((under, number))) for (mode, number), speed in speeds.items() if mode == over]
    return [speed / other for speed, other in pairs if other]


def _ratio(measurements: Iterable[Measurement], over: str, under: str) -> str:
    found = ratios(measurements, over, under)
    if not found:
        return "-"
    return f"{statistics.median(found):.3f} ({', '.join(f'{ratio:.3f}' for ratio in found)})"


def _median(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):.4g}" if found else ""
