"""A soak of the real server: random requests, disturbed in every way, and an account of each.

`python -m tests.sglang.soak --requests 10000 --seed 1` prints a table, and ends with 1 where a dump was wrong or a
request has no fate.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

from headrace.dumpfolder import read_dump, read_lost
from headrace.dumps import DUMP_SUFFIX, LOST_SUFFIX
from headrace.generate import read_answer
from tests.sglang.cases import accounts, provoking
from tests.sglang.cases.accounts import Account
from tests.sglang.cases.asking import Prompt
from tests.sglang.cases.checking import Reference
from tests.sglang.cases.rig import CHUNK, CONTEXT, MAIN, Rig, install_provoking
from tests.sglang.env import environment, install_headrace
from tests.sglang.models import Checkpoints
from tests.sglang.server import Servers
from tests.support.waiting import wait_until

CONCURRENCY = 12
FAMILIES, MEMBERS = 40, 6  # prompts of a family share a prefix
LONGEST = 4 * CHUNK
OTHERS = 3  # threads
_WISHES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"stream": True},
    {"return_logprob": True, "logprob_start_len": 0},
    {"return_hidden_states": True},
)
# Of a thousand requests, how many are of a kind.
KINDS = {
    "plain": 600,
    "generates": 120,
    "no extra key": 80,
    "aborted": 70,
    "gives up": 40,
    "twice at once": 25,
    "again": 25,
    "other tokens": 15,
    "other length": 15,
    "too long": 10,
}


class Soak:
    """A run of `requests` random requests; what was seen of each is in `accounts`."""

    def __init__(self, rig: Rig, requests: int, seed: int) -> None:
        self._rig = rig
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._gate = threading.Event()  # closed, nobody sends
        self._gate.set()
        self._pool = list(self._families())
        self._strangers: list[str] = []
        self.accounts: dict[str, Account] = {}
        self.beside: Counter[str] = Counter()
        self._kinds = self._rng.choices(list(KINDS), list(KINDS.values()), k=requests)

    def run(self) -> list[str]:
        """Send them all, wait until the server is idle, and say what does not add up."""
        before = self._rig.settled_counts()
        with self._beside(self._watch), self._beside(self._disturb):
            with self._beside(self._others, OTHERS), ThreadPoolExecutor(CONCURRENCY) as workers:
                for done in [workers.submit(self._send, kind, self._rng.random()) for kind in self._kinds]:
                    done.result()
            self._rig.client.resume()
            wait_until(lambda: self._rig.client.post("/flush_cache").status_code == 200, 60.0, "an idle server")
            wait_until(lambda: self._rig.folder.left() == [], 60.0, "an empty folder")
        found = accounts.problems(self.accounts, self._rows()) + self._strangers
        return found + self._miscounted(before)

    def _families(self) -> Iterator[tuple[int, ...]]:
        for _ in range(FAMILIES):
            shared = self._rig.prompts.ids(self._rng.choice((1, 9, CHUNK, 2 * CHUNK)))
            for _ in range(MEMBERS):
                yield shared + self._rig.prompts.ids(self._rng.randrange(1, LONGEST - len(shared)))

    def learn(self) -> None:
        """Compute the states of all prompts beforehand."""
        for ids in self._pool:
            self._rig.folder.reference.states(ids)

    # Sending.

    def _send(self, kind: str, seed: float) -> None:
        rng = random.Random(seed)
        ids = rng.choice(self._pool)
        self._gate.wait()
        with self._lock:
            prompt = self._rig.prompts.of(ids)
            self.accounts[prompt.rid] = Account(kind=kind, right=not kind.startswith("other"))
        _SENDERS.get(kind, Soak._plain)(self, prompt, rng)

    def _ask(self, prompt: Prompt, new_tokens: int = 0, timeout: float = 120.0, **more: Any) -> None:
        account = self.accounts[prompt.rid]
        try:
            answer = self._rig.client.capture(prompt, new_tokens, timeout, **more)
        except requests.Timeout:
            account.answers.append(accounts.GAVE_UP)
            return
        read = read_answer(answer.status_code, answer.content)
        words = {"answered": accounts.ANSWERED, "dropped": accounts.DROPPED, "refused": accounts.REFUSED}
        said = accounts.ABORTED if read.reason == "aborted" and read.outcome == "refused" else words[read.outcome]
        account.answers.append(said)

    def _plain(self, prompt: Prompt, _rng: random.Random) -> None:
        self._ask(prompt)

    def _generates(self, prompt: Prompt, rng: random.Random) -> None:
        self._ask(prompt, rng.choice((1, 2, 5, 20)))

    def _without_key(self, prompt: Prompt, rng: random.Random) -> None:
        self._ask(prompt, rng.choice((0, 0, 3)), extra_key=None)

    def _aborted(self, prompt: Prompt, rng: random.Random) -> None:
        """Some in the queue, some in the middle, some when it is too late."""
        delay, halfway = rng.random() * 0.3, rng.random() < 0.7

        def abort() -> None:
            if halfway:
                with suppress(AssertionError):  # it has one chunk only, or none is ever computed
                    self._rig.folder.wait_half(prompt.rid, 3.0)
            else:
                time.sleep(delay)
            self._rig.client.abort(prompt.rid)

        thread = threading.Thread(target=abort)
        thread.start()
        self._ask(prompt, rng.choice((0, 0, 30)))
        thread.join()

    def _gives_up(self, prompt: Prompt, rng: random.Random) -> None:
        self._ask(prompt, rng.choice((0, 0, 200)), timeout=rng.uniform(0.02, 0.4))

    def _twice_at_once(self, prompt: Prompt, _rng: random.Random) -> None:
        second = threading.Thread(target=self._ask, args=(prompt,))
        second.start()
        self._ask(prompt)
        second.join()

    def _again(self, prompt: Prompt, rng: random.Random) -> None:
        self._ask(prompt)
        self._ask(prompt, rng.choice((0, 3)), extra_key=rng.choice((None, prompt.rid)))

    def _other_tokens(self, prompt: Prompt, rng: random.Random) -> None:
        sent = list(prompt.ids)
        sent[rng.randrange(len(sent))] ^= 1
        self._ask(Prompt(rid=prompt.rid, ids=tuple(sent)))

    def _other_length(self, prompt: Prompt, rng: random.Random) -> None:
        self._ask(Prompt(rid=prompt.rid, ids=(*prompt.ids, 5) if rng.random() < 0.5 else prompt.ids[:-1] or (5, 6)))

    def _too_long(self, prompt: Prompt, rng: random.Random) -> None:
        self._ask(Prompt(rid=prompt.rid, ids=(*prompt.ids, *[5] * CONTEXT)[: CONTEXT + rng.choice((-4, 50))]))

    # Beside the requests.

    @contextmanager
    def _beside(self, work: Callable[[], None], threads: int = 1) -> Iterator[None]:
        stop = threading.Event()

        def loop() -> None:
            while not stop.is_set():
                work()

        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(loop) for _ in range(threads)]
            try:
                yield
            finally:
                stop.set()
                for thread in running:
                    thread.result()

    def _watch(self) -> None:
        """Look at the folder once, as the watcher does: check and remove what is there."""
        folder = self._rig.folder
        for path in sorted(folder.path.glob("hr-*")):
            suffix = DUMP_SUFFIX if path.name.endswith(DUMP_SUFFIX) else LOST_SUFFIX
            account = self.accounts.get(path.name.removesuffix(suffix))
            if account is None:
                self._strangers.append(f"{path.name} is of no request of this run")
            elif suffix == DUMP_SUFFIX:
                header = read_dump(path).header
                self.beside["dumps of several parts"] += header.parts > 1
                self.beside["dumps with rows that came again"] += header.retractions > 0
                account.dumps.append(folder.wrong(path))
            else:
                account.notices.append(read_lost(path).reason)
            path.unlink()
        time.sleep(0.02)

    def _disturb(self) -> None:
        rng = random.Random(sum(self.beside.values()))
        what = rng.choice(("retract", "retract", "retract alone", "retract alone", "in_place", "switch", "flush"))
        if what == "switch":
            with self._rig.provoked(provoking.RETRACT):
                time.sleep(rng.random())
        elif what == "flush":
            self._rig.client.post("/flush_cache")
        elif what == "retract alone":
            self._retract_alone(flush=rng.random() < 0.3)
        else:
            self._pause(what, flush=rng.random() < 0.3)
        self.beside[what] += 1
        time.sleep(rng.uniform(0.1, 1.0))

    def _pause(self, mode: str, *, flush: bool) -> None:
        self._rig.client.pause(mode)
        if flush:
            self._rig.client.post("/flush_cache")
        self._rig.client.resume()

    def _retract_alone(self, *, flush: bool) -> None:
        """Let the queue run empty before: a retracted prompt goes to its end, and is lost to whoever overtakes it."""
        self._gate.clear()
        try:
            with suppress(AssertionError):
                wait_until(lambda: self._rig.waiting() == 0, 5.0)
            self._pause("retract", flush=flush)
        finally:
            self._gate.set()

    def _others(self) -> None:
        rng = random.Random()
        self._gate.wait()
        ids, wishes, new_tokens = rng.choice(self._pool), rng.choice(_WISHES), rng.choice((0, 5, 40))
        if "return_hidden_states" in wishes:
            ids, new_tokens = ids[:20], 0  # whose answer is megabytes otherwise
        answer = self._rig.client.generate(ids, None, new_tokens, **wishes)
        assert answer.status_code == 200, answer.text
        self.beside["others"] += 1

    # Afterwards.

    def _rows(self) -> Counter[str]:
        """How many rows of each request's prompt were computed."""
        rows: Counter[str] = Counter()
        for rid, piece in self._rig.all_pieces():
            if rid in self.accounts and 0 <= piece.prefix < int(rid.split("-")[4]):
                rows[rid] += piece.rows
        return rows

    def _miscounted(self, before: Counter[str]) -> list[str]:
        seen = Counter(f"lost: {reason}" for account in self.accounts.values() for reason in account.notices)
        seen["published"] = sum(len(account.dumps) for account in self.accounts.values())

        counted = self._rig.settled_counts()
        return [
            f"{name}: {seen[name]} were seen, the engine counts {counted[name] - before[name]}"
            for name in sorted(seen | counted)
            if seen[name] != counted[name] - before[name]
        ]


_SENDERS: dict[str, Callable[[Soak, Prompt, random.Random], None]] = {
    "generates": Soak._generates,
    "no extra key": Soak._without_key,
    "aborted": Soak._aborted,
    "gives up": Soak._gives_up,
    "twice at once": Soak._twice_at_once,
    "again": Soak._again,
    "other tokens": Soak._other_tokens,
    "other length": Soak._other_length,
    "too long": Soak._too_long,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sglang.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as name:
        place = Path(name)
        provoked = install_provoking(place / "provoking")
        made, site = environment(), place / "site"
        install_headrace(made.python, site)
        made = made.before(provoked, site)
        pool = Servers(environment=lambda _: made, checkpoint=Checkpoints(place / "models").get, logs=place / "logs")
        with pool.alone(MAIN) as server:
            rig = Rig(server, Reference(server.model, server.card().boundaries), f"soak {chosen.seed}")
            soak = Soak(rig, chosen.requests, chosen.seed)
            soak.learn()
            began = time.monotonic()
            found = soak.run()
            seconds = time.monotonic() - began
            rig.client.close()
    lines = [accounts.table(soak.accounts), ""]
    lines.append(f"{chosen.requests} requests in {seconds:.0f} s; beside them {dict(sorted(soak.beside.items()))}")
    lines += found or ["No wrong dump, and each request is accounted for."]
    print("\n".join(lines))  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
