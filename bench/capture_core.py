"""Measures what the capture core costs an engine, and how fast it publishes, in one process and one folder.

Usage: python bench/capture_core.py [FOLDER] [--shape 1b|8b|wide] [--device cpu|cuda] [--engine-ms N] [--python-ms N]

The engine is a loop that works as a scheduler does: some Python, then a forward of `--engine-ms` (on a GPU: matrix
products; on a CPU: nothing), one launched ahead. Rounds with ids of ours and with ids that nobody captures are
interleaved. Prints, as medians of the rounds: the engine's speed with capture as a part of that without, and that of
its Python alone; bytes/s while the engine runs and until everything is published, and of `write()` of these bytes
into fresh files from as many threads; what a forward cost the calling thread, and a published gigabyte all threads.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.ids import RequestId
from headrace_capture.config import CaptureConfig
from headrace_capture.core import Capture
from headrace_capture.forward import Forward, Piece

SHAPES = {"1b": (2048, 3), "8b": (4096, 3), "wide": (7168, 3)}  # D and k


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds that a round took: the engine's loop, its Python, until all was published, of CPU, and each forward()."""

    engine: float
    python: float
    published: float
    cpu: float
    forwards: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--requests", type=int, default=4, help="prompts in a forward")
    parser.add_argument("--forwards", type=int, default=8, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--buffer-bytes", type=int, default=1 << 29)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine-ms", type=float, default=0.0, help="of a forward, on a GPU")
    parser.add_argument(
        "--python-ms", type=float, default=0.0, help="of the scheduler's own Python, before each forward"
    )
    parser.add_argument("--packed", action="store_true", help="the boundaries come as one tensor")
    parser.add_argument("--max-wait", type=float, default=10.0, help="seconds that a forward may wait for room")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the engine's own threads are not what is measured
    place = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=args.folder))
    try:
        measure(args, place)
    finally:
        shutil.rmtree(place)


def measure(args: argparse.Namespace, place: Path) -> None:
    """Run the rounds and print what they gave; the first of each kind warms up."""
    capture = start(place / "dumps", args)
    engine = Engine(args)
    on, off, plain = [], [], []
    try:
        for number in range(args.rounds + 1):
            off.append(run(capture, engine, args, None))
            on.append(run(capture, engine, args, number))
            remove(place.glob("dumps/*.safetensors"))
            plain.append(write_round(place, args))
            remove(place.glob("plain-*"))
        stats = capture.stats()
    finally:
        capture.close(10)
    nbytes = args.forwards * args.requests * args.tokens * token_bytes(args.shape)
    ratios = [without.engine / one.engine for one, without in zip(on[1:], off[1:], strict=True)]
    python = [without.python / one.python for one, without in zip(on[1:], off[1:], strict=True) if one.python]
    running = statistics.median(nbytes / one.engine for one in on[1:])
    published = statistics.median(nbytes / one.published for one in on[1:])
    written = statistics.median(plain[1:])
    costs = sorted(cost for one in on[1:] for cost in one.forwards)
    cpu = statistics.median((one.cpu - without.cpu) / nbytes for one, without in zip(on[1:], off[1:], strict=True))
    print(f"{args.shape} shape, {args.writers} writers, {args.device}{', packed' if args.packed else ''}")
    print(f"engine     {_median(ratios)} of its speed without capture")
    print(f"python     {_median(python)} of its speed without capture")
    print(f"running    {running / 1e9:7.2f} GB/s")
    print(f"published  {published / 1e9:7.2f} GB/s, {published / written:.2f} of write()")
    print(f"write()    {written / 1e9:7.2f} GB/s, {args.writers} threads, fresh files")
    print(f"forward()  {_ms(costs, 50)} ms median, {_ms(costs, 99)} ms p99, {_ms(costs, 100)} ms at most")
    print(f"CPU        {1e9 * cpu:7.2f} s per GB")
    buffers = f"{stats.ring_bytes >> 20} MiB, {stats.pinned_bytes >> 20} pinned, {stats.device_bytes >> 20} on the GPU"
    print(f"buffer     {buffers}; waited for {stats.waited_ms:.0f} ms in all")


def _median(ratios: list[float]) -> str:
    return f"{statistics.median(ratios or [1.0]):7.3f} ({' '.join(f'{ratio:.3f}' for ratio in ratios)})"


def _ms(ascending: list[float], percent: int) -> str:
    return f"{1e3 * ascending[min(len(ascending) - 1, len(ascending) * percent // 100)]:.2f}"


def token_bytes(shape: str) -> int:
    """Bytes of a dump per token, bfloat16."""
    hidden, boundaries = SHAPES[shape]
    return 8 + (boundaries + 1) * hidden * 2


def remove(paths: Iterable[Path]) -> None:
    """Remove the files of a round."""
    for path in paths:
        path.unlink()


def start(folder: Path, args: argparse.Namespace) -> Capture:
    """Start a capture in a folder."""
    hidden, boundaries = SHAPES[args.shape]
    config = CaptureConfig(
        dump_dir=folder, buffer_bytes=args.buffer_bytes, writers=args.writers, max_wait_seconds=args.max_wait
    )
    return Capture(
        config,
        model="bench",
        fingerprint="bench",
        weight_version="0",
        boundaries=tuple(range(2, 2 + boundaries)),
        final_state="pre_norm",
        layers=32,
        hidden_size=hidden,
        dtype=torch.bfloat16,
        device=args.device,
    )


class Engine:
    """States that are always the same, and work that takes as long as a forward would."""

    def __init__(self, args: argparse.Namespace) -> None:
        hidden, boundaries = SHAPES[args.shape]
        rows = args.tokens * args.requests
        widths = [boundaries * hidden] if args.packed else [hidden] * boundaries
        self.boundaries = tuple(states(rows, width, args.device) for width in widths)
        self.final = states(rows, hidden, args.device)
        self.ids = torch.arange(args.tokens).repeat(args.requests).to(args.device)
        self._cuda = args.device.startswith("cuda")
        self._products = 0
        self._loops = repeats(spin, args.python_ms)
        if self._cuda and args.engine_ms:
            self._matrix = states(8192, 8192, args.device)
            self._product = torch.empty_like(self._matrix)
            self._products = repeats(self._multiply, args.engine_ms)
        self._ended: list[torch.cuda.Event] = []

    def schedule(self) -> None:
        """What a scheduler does before a forward, with the GIL held."""
        spin(self._loops)

    def launch(self) -> None:
        """Start a forward; the states are those that it ends with."""
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def launched(self) -> None:
        """The forward and what belongs to it are launched: wait for the one before it."""
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._ended.append(event)
            if len(self._ended) > 1:
                self._ended.pop(0).synchronize()

    def finish(self) -> None:
        """Wait for all of them."""
        while self._ended:
            self._ended.pop(0).synchronize()

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix, out=self._product)
        torch.cuda.synchronize()


def states(rows: int, width: int, device: str) -> torch.Tensor:
    """Random states [rows, width]."""
    return torch.randn(rows, width, device=device, dtype=torch.bfloat16 if device != "cpu" else None).to(torch.bfloat16)


def spin(count: int) -> int:
    """Python that holds the GIL."""
    total = 0
    for number in range(count):
        total += number & 7
    return total


def repeats(work: Callable[[int], object], milliseconds: float) -> int:
    """How often `work` is repeated in so many milliseconds, measured now."""
    if not milliseconds:
        return 0
    work(1)
    count, seconds = 1, 0.0
    while seconds < 0.05:
        count *= 2
        begin = time.perf_counter()
        work(count)
        seconds = time.perf_counter() - begin
    return max(1, round(count * milliseconds / 1e3 / seconds))


def run(capture: Capture, engine: Engine, args: argparse.Namespace, number: int | None) -> Round:
    """Run a round's forwards under ids of ours, or without a number under ids that nobody captures."""
    made = []
    for forward in range(args.forwards):
        ordinals = range(forward * args.requests, (forward + 1) * args.requests)
        nonce = f"{number or 0:08d}"
        rids = [str(RequestId.make("bench", ordinal, nonce, range(args.tokens))) for ordinal in ordinals]
        pieces = [
            Piece(rid=rid if number is not None else f"x{rid}", prompt_tokens=args.tokens, prefix=0, rows=args.tokens)
            for rid in rids
        ]
        made.append(
            Forward(
                pieces=tuple(pieces),
                token_ids=engine.ids,
                boundaries=engine.boundaries,
                final=engine.final,
                weight_version="0",
            )
        )
    before, costs, python = capture.counts().published, [], 0.0
    cpu, begin = time.process_time(), time.perf_counter()
    for captured in made:
        start = time.perf_counter()
        engine.schedule()
        python += time.perf_counter() - start
        engine.launch()
        start = time.perf_counter()
        dropped = capture.forward(captured)
        costs.append(time.perf_counter() - start)
        if dropped:
            raise SystemExit(f"lost: {dropped}; is the folder large enough?")
        engine.launched()
    engine.finish()
    ended = time.perf_counter()
    capture.flush(600)
    published = time.perf_counter()
    expected = before + (args.forwards * args.requests if number is not None else 0)
    if capture.counts().published != expected:
        raise SystemExit(f"not everything was published: {capture.counts()}")
    return Round(
        engine=ended - begin,
        python=python if args.python_ms else 0.0,
        published=published - begin,
        cpu=time.process_time() - cpu,
        forwards=costs,
    )


def write_round(folder: Path, args: argparse.Namespace) -> float:
    """Write as many files of the same size with plain writes; bytes/s."""
    data = memoryview(bytearray(b"x") * (args.tokens * token_bytes(args.shape)))
    count: int = args.forwards * args.requests

    def write(number: int) -> None:
        with (folder / f"plain-{number}").open("wb", buffering=0) as file:
            file.write(data)

    with ThreadPoolExecutor(args.writers) as pool:
        begin = time.perf_counter()
        list(pool.map(write, range(count)))
        seconds = time.perf_counter() - begin
    return count * len(data) / seconds


if __name__ == "__main__":
    main()
