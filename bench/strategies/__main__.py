"""Right, wrong and lost rows of three common ways of pairing dumps with samples, beside headrace's.

Run from the repository's root: `python -m bench.strategies [--samples N] [--seed S] [--all] [--json FILE]`.
Exits with 1 when headrace has a row that is wrong, or lacks one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.options import result_file
from bench.strategies.judging import Judge, Score
from bench.strategies.samples import VOCABULARY, Prompts
from bench.strategies.trials import HEADRACE, STRATEGIES, Conditions, run_headrace, run_naive
from headrace_engine.model import quiet
from tests.support.tiny_models import tiny_llama

_CACHE, _STEP = 200_000, 1024
_WHOLE = 65_536  # a step that holds all that is in flight
CONDITIONS = (
    Conditions(name="8 at a time", concurrency=8, prefix_cache=_CACHE, step=_STEP, shared=True),
    Conditions(name="no cache, whole prompts", concurrency=8, prefix_cache=0, step=_WHOLE, shared=True),
    Conditions(name="and 1 at a time", concurrency=1, prefix_cache=0, step=_WHOLE, shared=True),
    Conditions(name="and nobody else", concurrency=1, prefix_cache=0, step=_WHOLE, shared=False),
)


def main() -> int:
    """Run all, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.strategies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=300, help="prompts in the data set")
    parser.add_argument("--seed", type=int, default=2, help="of the prompts")
    parser.add_argument("--all", action="store_true", help="run headrace under every condition, not the hardest alone")
    parser.add_argument("--json", type=result_file, help="write the figures to this file, too")
    options = parser.parse_args()
    if options.samples < 1:
        parser.error("--samples: give at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the blocks that end what was started
    quiet()
    source = Prompts(options.seed)
    prompts = [source.next() for _ in range(options.samples)]
    scores = []
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_llama(Path(scratch) / "model", vocab=VOCABULARY)
        judge = Judge(prompts, model)
        folder = Path(scratch) / "trial"
        for name, conditions in _trials(everywhere=options.all):
            if name == HEADRACE:
                trial = run_headrace(conditions, prompts, model, folder)
            else:
                trial = run_naive(name, conditions, prompts, model, folder)
            scores.append(judge.score(trial))
            print(_line(scores[-1]), file=sys.stderr, flush=True)
            shutil.rmtree(folder)
    print(_table(scores))
    if options.json:
        options.json.write_text(json.dumps([score.as_dict() for score in scores], indent=2) + "\n")
    return int(any(score.right < score.samples for score in scores if score.trial.pairing == HEADRACE))


def _trials(*, everywhere: bool) -> Iterator[tuple[str, Conditions]]:
    for conditions in CONDITIONS:
        for name in STRATEGIES:
            yield name, conditions
        if everywhere or conditions is CONDITIONS[0]:
            yield HEADRACE, conditions


def _line(score: Score) -> str:
    trial = score.trial
    notes = (
        f"{trial.refused} refused, {trial.again} again" if trial.pairing == HEADRACE else f"{trial.short} short dumps"
    )
    return (
        f"{trial.conditions.name}: {trial.pairing}: {_cell(score)} % in {trial.seconds:.0f} s, "
        f"beside {trial.probes} probes and {trial.chats} chats; {notes}"
    )


def _table(scores: Sequence[Score]) -> str:
    cells = {(score.trial.pairing, score.trial.conditions): _cell(score) for score in scores}
    lines = [
        f"Of {scores[0].samples} samples, in %: right / wrong (with the right count of rows) / lost",
        "",
        "| pairing | " + " | ".join(conditions.name for conditions in CONDITIONS) + " |",
        "|---|" + "---|" * len(CONDITIONS),
    ]
    for name in (*STRATEGIES, HEADRACE):
        row = (cells.get((name, conditions), "") for conditions in CONDITIONS)
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def _cell(score: Score) -> str:
    right, wrong, silent, lost = (
        f"{100 * count / score.samples:.1f}" for count in (score.right, score.wrong, score.silent, score.lost)
    )
    return f"{right} / {wrong} ({silent}) / {lost}"


if __name__ == "__main__":
    sys.exit(main())
