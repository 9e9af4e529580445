"""`python -m bench.engine_overhead`: exits 0, 1 when anything was wrong, lost or unanswered, 2 for bad arguments.

Run from the repository's root. On a CPU the server runs in the tests' own environment unless --python names another
interpreter; on a GPU in the one that runs this. Flags of the server follow `--`. The plugin's HEADRACE_CAPTURE_*
variables are passed on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from bench.engine_overhead import report
from bench.engine_overhead.course import Course, Measurement
from bench.engine_overhead.load import Traffic
from bench.engine_overhead.server import Launch, Server
from bench.engine_overhead.shapes import SHAPES, Model, model_of
from bench.engine_overhead.taker import Taker
from bench.options import result_file
from headrace.errors import HeadraceError

# Threads of a server that spin while they wait take the cores from the other, and a forward of milliseconds seconds.
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
# The options that say what was measured, and not where things lie.
_MEASURE = ("shape", "device", "requests", "tokens", "in_flight", "repetitions", "warm_up", "seed", "flags")


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the blocks that end what was started
    measured: list[Measurement] = []
    try:
        with ExitStack() as stack:
            dumps = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=options.dumps))
            stack.callback(shutil.rmtree, dumps, ignore_errors=True)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            out = stack.enter_context(options.out.open("a")) if options.out else None
            model = model_of(options.shape, scratch)
            course = _start(stack, options, model, dumps / "dumps", scratch)
            _record(out, _facts(options, course.captured))
            course.warm_up(options.warm_up)
            for measurement in course.run(options.repetitions):
                measured.append(measurement)
                print(report.line(measurement), flush=True)
                _record(out, report.as_json(measurement))
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        if measured:
            print(f"\n{options.shape} on {options.device}, {options.in_flight} in flight\n\n{report.table(measured)}")
    wrong = any(measurement.taken is not None and measurement.taken.wrong for measurement in measured)
    return int(wrong or (not options.allow_losses and any(measurement.problems for measurement in measured)))


def _start(stack: ExitStack, options: argparse.Namespace, model: Model, dumps: Path, scratch: Path) -> Course:
    """Start the servers together, and wait until both serve."""
    launch = _launch(options, scratch)
    logs = options.logs or scratch
    captured = Server(launch, model.folder, logs / f"server-{model.name}-captured.log", dumps)
    reference = Server(launch, model.folder, logs / f"server-{model.name}-reference.log")
    servers = [captured] if options.no_reference else [captured, reference]
    for server in servers:
        stack.enter_context(server)
        if options.device == "cpu":  # both at once would need the memory and the cores twice
            server.wait(options.start_seconds)
    for server in servers:
        server.wait(options.start_seconds)
    traffic = Traffic(
        requests=options.requests,
        in_flight=options.in_flight,
        shortest=options.tokens[0],
        longest=options.tokens[1],
        vocabulary=model.vocabulary,
    )
    return Course(
        captured=captured,
        reference=None if options.no_reference else reference,
        taker=stack.enter_context(Taker(dumps, options.check_every)),
        traffic=traffic,
        seed=options.seed,
    )


def _launch(options: argparse.Namespace, scratch: Path) -> Launch:
    flags = tuple(options.flags)
    command: tuple[str, ...] = ("-m", "sglang.launch_server")
    if options.launcher:
        command = (str(options.launcher),)
    if options.device == "cpu" and options.python is None:
        from tests.sglang.env import environment, install_headrace

        made = environment(*filter(None, [options.sglang])).before(scratch / "site")
        install_headrace(made.python, scratch / "site")
        settings = _settings() | _PASSIVE
        command = (str(made.python), str(made.paths[-1] / "launch.py"))
        return Launch(command=command, environ=made.environ(**settings), device=options.device, flags=flags)
    python = str(options.python or sys.executable)
    paths = [*map(str, options.site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environ |= _PASSIVE if options.device == "cpu" else {}
    return Launch(command=(python, *command), environ=environ, device=options.device, flags=flags)


def _settings() -> dict[str, str]:
    """The plugin's settings that are given, but for the folder."""
    return {name: value for name, value in os.environ.items() if name.startswith("HEADRACE_CAPTURE_")}


def _facts(options: argparse.Namespace, server: Server) -> str:
    """What the figures are of: options, versions, machine."""
    with urllib.request.urlopen(f"{server.url}/get_server_info", timeout=30) as answer:
        info: Mapping[str, Any] = json.loads(answer.read())
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        gpu = ""
    given = {name: getattr(options, name) for name in _MEASURE}
    facts = {
        "options": given,
        "sglang": info.get("version"),
        "gpu": gpu,
        "cores": os.cpu_count(),
        "settings": _settings(),
    }
    return json.dumps(facts)


def _record(out: TextIO | None, text: str) -> None:
    if out is not None:
        print(text, file=out, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="tiny", help=f"{', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=_count, default=256, help="in a measurement")
    parser.add_argument("--tokens", type=_range, default=(512, 3584), help="of a prompt, SHORTEST:LONGEST")
    parser.add_argument("--in-flight", type=_count, default=64)
    parser.add_argument("--repetitions", type=_count, default=3)
    parser.add_argument("--warm-up", type=_count, default=64, help="requests of each mode that do not count")
    parser.add_argument("--no-reference", action="store_true", help="start no server without capture beside the other")
    parser.add_argument("--allow-losses", action="store_true", help="exit with 0 also when requests were lost")
    parser.add_argument("--check-every", type=_count, default=8, help="dump whose checksum is computed, too")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' lengths")
    parser.add_argument("--dumps", type=Path, default=Path("/dev/shm"), help="where the dump folder is made, a tmpfs")
    parser.add_argument("--sglang", help="version in the tests' own environment; without it, the newest of those")
    parser.add_argument("--python", type=Path, help="the server's interpreter")
    parser.add_argument("--site", type=Path, action="append", default=[], help="a folder of packages for the server")
    parser.add_argument("--launcher", type=Path, help="a script that starts the server, instead of SGLang's module")
    parser.add_argument("--start-seconds", type=_count, default=400, help="within which a server must serve")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the servers' logs")
    parser.add_argument("--out", type=result_file, help="a file to which the measurements are added, as JSON lines")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the server")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give at least 1")
    return value


def _range(text: str) -> tuple[int, int]:
    shortest, _, longest = text.partition(":")
    low, high = int(shortest), int(longest or shortest)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text}: give SHORTEST:LONGEST, at least one token")
    return low, high


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
