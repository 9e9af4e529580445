"""Bytes per second of storing dumps of 64 MiB, as a ratio to a plain copy with fsync in the same run.

Run from the repository's root: `python -m bench.writer_floor [--dumps FOLDER] [--output FOLDER] [--count N]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from headrace.ids import RequestId
from headrace.masks import encode_mask
from headrace.messages import StoreJob
from headrace.runs import RunSpec
from headrace_writer.store import Store, Stored
from tests.support.dumps import ENGINE, MODEL, WEIGHTS, make_dump

BOUNDARIES, HIDDEN, TOKENS = (2, 16, 29), 4096, 2048


def main() -> None:
    """Store and copy in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dumps", type=Path, default=Path("/dev/shm"), help="where the dumps lie, a tmpfs")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()), help="where rows and copies go")
    parser.add_argument("--count", type=int, default=12, help="dumps that are stored, and as many that are copied")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.dumps) as dumps,
        tempfile.TemporaryDirectory(dir=options.output) as output,
    ):
        measure(Path(dumps), Path(output), options.count)


def measure(dumps: Path, output: Path, count: int) -> None:
    """Measure `count` rounds of one store and one copy each, after one round that does not count."""
    token_ids = range(TOKENS)
    spec = RunSpec(
        run="bench",
        dataset="bench",
        total=count + 1,
        model="bench",
        model_digest="cccccccccccccccc",
        engine_model=MODEL,
        boundaries=BOUNDARIES,
        final_state="pre_norm",
        hidden_size=HIDDEN,
        format="headrace",
        output=str(output / "dataset"),
        max_attempts=1,
    )
    store = Store(output / "dataset", spec, "bench")
    stored, copied = [], []
    size = 0
    for ordinal in range(count + 1):
        request = RequestId.make("bench", ordinal, "aaaaaaaa", token_ids)
        dump = make_dump(dumps, request, token_ids, BOUNDARIES, HIDDEN, seed=ordinal)
        job = StoreJob(
            request=str(request),
            sample=str(ordinal),
            job=1,
            mask=encode_mask([1] * TOKENS),
            engine=ENGINE,
            weight_version=WEIGHTS,
        )
        size = dump.stat().st_size
        begin = time.perf_counter()
        outcome = store.store(job, dump, datetime.now(UTC))
        stored.append(time.perf_counter() - begin)
        assert isinstance(outcome, Stored), outcome
        copied.append(copy(dump, output / f"{ordinal}.copy"))
        dump.unlink()
        (output / "dataset" / outcome.line.path).unlink()
        (output / f"{ordinal}.copy").unlink()
    store.close()
    store_rate, copy_rate = (size / statistics.median(times[1:]) / 1e9 for times in (stored, copied))
    print(f"dump of {size / 2**20:.0f} MiB, median of {count}")
    print(f"store: {store_rate:.2f} GB/s   copy with fsync: {copy_rate:.2f} GB/s   ratio: {store_rate / copy_rate:.2f}")


def copy(source: Path, target: Path) -> float:
    """Copy a file, make it last, and return the seconds that took."""
    begin = time.perf_counter()
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
        writing.flush()
        os.fsync(writing.fileno())
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
