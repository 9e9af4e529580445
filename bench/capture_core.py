"""Measures the capture core against a plain write of the same bytes, in one process and one folder.

Usage: python bench/capture_core.py [FOLDER] [--tokens N] [--hidden D] [--requests R] [--forwards F] [--device cpu|cuda]

Prints, as medians of the rounds: bytes/s until everything is published, the same for `write()` of the same bytes into
fresh files from as many threads, their ratio, and what each forward cost the calling thread.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headrace.ids import RequestId
from headrace_capture.config import CaptureConfig
from headrace_capture.core import Capture
from headrace_capture.forward import Forward, Piece

BOUNDARIES = (2, 16, 29)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=4, help="prompts in a forward")
    parser.add_argument("--forwards", type=int, default=8, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--buffer-bytes", type=int, default=1 << 28)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the engine's own threads are not what is measured
    captured, plain, forwards = [], [], []
    place = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=args.folder))
    capture = start(place / "dumps", args)
    try:
        for number in range(args.rounds + 1):  # the first warms up
            speed, costs = capture_round(capture, args, number)
            remove(place.glob("dumps/*.safetensors"))
            written = write_round(place, args)
            remove(place.glob("plain-*"))
            if number:
                captured.append(speed)
                plain.append(written)
                forwards += costs
    finally:
        capture.close(10)
        shutil.rmtree(place)
    forwards.sort()
    ours, theirs = statistics.median(captured), statistics.median(plain)
    print(f"capture    {ours / 1e9:6.2f} GB/s until published")
    print(f"write()    {theirs / 1e9:6.2f} GB/s, {args.writers} threads, fresh files")
    print(f"ratio      {ours / theirs:6.2f}")
    print(f"forward()  {1e3 * forwards[len(forwards) // 2]:6.2f} ms median, {1e3 * forwards[-1]:.2f} ms at most")


def token_bytes(hidden: int) -> int:
    """Bytes of a dump per token, bfloat16."""
    return 8 + (len(BOUNDARIES) + 1) * hidden * 2


def remove(paths: Iterable[Path]) -> None:
    """Remove the files of a round."""
    for path in paths:
        path.unlink()


def start(folder: Path, args: argparse.Namespace) -> Capture:
    """Start a capture in a folder."""
    config = CaptureConfig(dump_dir=folder, buffer_bytes=args.buffer_bytes, writers=args.writers, max_wait_seconds=10)
    return Capture(
        config,
        model="bench",
        fingerprint="bench",
        weight_version="0",
        boundaries=BOUNDARIES,
        final_state="pre_norm",
        layers=32,
        hidden_size=args.hidden,
        dtype=torch.bfloat16,
        device=args.device,
    )


def capture_round(capture: Capture, args: argparse.Namespace, number: int) -> tuple[float, list[float]]:
    """Capture the forwards of a round; bytes/s, and the seconds that each call took."""
    rows = args.tokens * args.requests
    states = [torch.randn(rows, args.hidden, device=args.device).to(torch.bfloat16) for _ in range(len(BOUNDARIES) + 1)]
    ids = torch.arange(args.tokens).repeat(args.requests).to(args.device)
    before = capture.counts().published
    costs = []
    begin = time.perf_counter()
    for forward in range(args.forwards):
        ordinals = range(forward * args.requests, (forward + 1) * args.requests)
        rids = [str(RequestId.make("bench", ordinal, f"{number:08d}", range(args.tokens))) for ordinal in ordinals]
        pieces = tuple(Piece(rid=rid, prompt_tokens=args.tokens, prefix=0, rows=args.tokens) for rid in rids)
        made = Forward(
            pieces=pieces, token_ids=ids, boundaries=tuple(states[:-1]), final=states[-1], weight_version="0"
        )
        start = time.perf_counter()
        dropped = capture.forward(made)
        costs.append(time.perf_counter() - start)
        if dropped:
            raise SystemExit(f"lost: {dropped}; is the folder large enough?")
    capture.flush(600)
    seconds = time.perf_counter() - begin
    if capture.counts().published != before + args.forwards * args.requests:
        raise SystemExit(f"not everything was published: {capture.counts()}")
    return args.forwards * rows * token_bytes(args.hidden) / seconds, costs


def write_round(folder: Path, args: argparse.Namespace) -> float:
    """Write as many files of the same size with plain writes; bytes/s."""
    data = memoryview(bytearray(b"x") * (args.tokens * token_bytes(args.hidden)))
    count = args.forwards * args.requests

    def write(number: int) -> None:
        with (folder / f"plain-{number}").open("wb", buffering=0) as file:
            file.write(data)

    with ThreadPoolExecutor(args.writers) as pool:
        begin = time.perf_counter()
        list(pool.map(write, range(count)))
        return count * len(data) / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
