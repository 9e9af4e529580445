"""The load of one measurement: prompts of drawn lengths, so many in flight at a time, and what was answered."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.generate import HEADERS, encode_body, read_answer
from headrace.ids import NONCE_ALPHABET, NONCE_LENGTH, RequestId

_TIMEOUT = 600.0  # seconds without a byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What every measurement sends: `requests` prompts of `shortest` to `longest` tokens, `in_flight` at a time.

    Token ids are below `vocabulary`.
    """

    requests: int
    in_flight: int
    shortest: int
    longest: int
    vocabulary: int

    def lengths(self, seed: int) -> list[int]:
        """The prompts' lengths; equal for an equal seed, whoever the prompts are for."""
        draw = random.Random(seed)
        return [draw.randint(self.shortest, self.longest) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What became of a load: `began` (monotonic seconds), how long until the last answer, and answers by outcome.

    An outcome is `answered`, or what `headrace.generate.read_answer` says, with its reason.
    """

    tokens: int
    began: float
    seconds: float
    outcomes: Mapping[str, int]


def bodies(run: str, lengths: Sequence[int], vocabulary: int, *, ours: bool) -> list[bytes]:
    """Bodies of `/generate`, with fresh tokens; `ours` decides whether the plugin takes their ids for its own."""
    draw = random.Random()
    made = []
    for ordinal, length in enumerate(lengths):
        ids = draw.choices(range(min(100, vocabulary // 2), vocabulary), k=length)
        nonce = "".join(draw.choices(NONCE_ALPHABET, k=NONCE_LENGTH))
        request = str(RequestId.make(run, ordinal, nonce, ids))
        # The same length, and no id of ours: its prefix is another.
        made.append(encode_body(request if ours else "xx" + request[2:], ids))
    return made


def send(url: str, requests: Sequence[bytes], lengths: Sequence[int], in_flight: int) -> Sent:
    """Send all, `in_flight` at a time over a connection each, and wait for their answers."""
    waiting = iter(requests)
    lock = threading.Lock()
    outcomes: Counter[str] = Counter()

    def one_after_another() -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT)
        with contextlib.closing(connection):
            while True:
                with lock:
                    body = next(waiting, None)
                if body is None:
                    return
                outcome = _ask(connection, body)
                with lock:
                    outcomes[outcome] += 1

    began = time.monotonic()
    with ThreadPoolExecutor(in_flight) as pool:
        for sending in [pool.submit(one_after_another) for _ in range(in_flight)]:
            sending.result()
    return Sent(tokens=sum(lengths), began=began, seconds=time.monotonic() - began, outcomes=dict(outcomes))


def _ask(connection: http.client.HTTPConnection, body: bytes) -> str:
    try:
        connection.request("POST", "/generate", body, HEADERS)
        response = connection.getresponse()
        answer = read_answer(response.status, response.read())
    except (OSError, http.client.HTTPException) as error:
        connection.close()  # the next request opens it again
        return type(error).__name__
    return f"{answer.outcome} {answer.reason}".strip()
