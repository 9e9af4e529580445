"""Asks an engine directly, as a stranger: what it is, how it was started, and which token it says comes next."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import requests

from headrace.errors import Unavailable

# SGLang before and after it renamed its path, which it complains about in its log.
_INFO_PATHS = ("/server_info", "/get_server_info")
_CONNECT, _ANSWER = 3.0, 10.0  # seconds
_MOST_BYTES = 1 << 20  # of an answer
_SHOWN = 120  # characters of an answer that is none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    status_code: int
    content: bytes


class Server:
    """One engine, for one thread; a context manager that closes its connections."""

    def __init__(self, url: str, seconds: float) -> None:
        """Ask at this URL, and wait for a token at most so many seconds."""
        self.url = url.rstrip("/")
        self._seconds = seconds
        self._session = requests.Session()
        self._session.trust_env = False  # the engine itself, and no proxy of the environment

    def __enter__(self) -> Self:
        """Nothing is asked yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self._session.close()

    def info(self) -> Mapping[str, Any]:
        """What the engine says of itself: its flags as it resolved them, and what it found.

        Raises:
            Unavailable: it does not answer, or not as SGLang does.
        """
        for path in _INFO_PATHS:
            response = self._send("GET", path, min(_ANSWER, self._seconds))
            if response.status_code != 404:
                break
        else:
            raise Unavailable(f"{self.url} answers, and is no SGLang server: it has no {path}; is this the right port?")
        table = self._table(path, response)
        if not isinstance(table.get("model_path"), str):
            raise Unavailable(f"{self.url}{path} names no model_path, as SGLang does; what answers there?")
        return table

    def next_token(self, token_ids: Sequence[int]) -> int:
        """The token that the engine itself says comes next, greedily, in a request that is not headrace's.

        Raises:
            Unavailable: it does not answer, or not with token ids.
        """
        # A key of its own hits no prefix cache, as the requests that are captured hit none.
        name = f"doctor-{secrets.token_hex(8)}"
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True, "repetition_penalty": 1.0}
        body = {"input_ids": list(token_ids), "rid": name, "extra_key": name, "sampling_params": sampling}
        table = self._table("/generate", self._send("POST", "/generate", self._seconds, body))
        match table.get("output_ids"):
            case [int(token)]:
                return token
        raise Unavailable(f"{self.url}/generate gives no output_ids of one token, but {str(table)[:_SHOWN]}")

    def _send(self, method: str, path: str, seconds: float, body: Mapping[str, Any] | None = None) -> _Response:
        try:
            return self._received(method, path, seconds, body)
        except requests.exceptions.ConnectTimeout as error:
            raise Unavailable(
                f"no connection to {self.url} in {_CONNECT:g} s; is the address right, from here?"
            ) from error
        except requests.Timeout as error:
            hint = "it hangs, or is overloaded: see its log"
            raise Unavailable(f"{self.url}{path} does not answer in {seconds:g} s; {hint}") from error
        except requests.RequestException as error:
            hint = "start the engine, or mend its address"
            raise Unavailable(f"{self.url}{path} cannot be asked ({_cause(error)}); {hint}") from error

    def _received(self, method: str, path: str, seconds: float, body: Mapping[str, Any] | None) -> _Response:
        # Not left to requests: its time-out is for each piece of an answer, and an answer has no end that it knows of.
        until = time.monotonic() + seconds
        url, patience = self.url + path, (_CONNECT, seconds)
        with self._session.request(method, url, json=body, timeout=patience, stream=True) as response:
            content = bytearray()
            for piece in response.iter_content(1):  # a larger one is waited for until it is whole
                content += piece
                if time.monotonic() > until:
                    raise requests.Timeout
                if len(content) > _MOST_BYTES:
                    raise Unavailable(f"{url} answers without an end; is it an SGLang server?")
            return _Response(status_code=response.status_code, content=bytes(content))

    def _table(self, path: str, response: _Response) -> dict[str, Any]:
        status, where = response.status_code, self.url + path
        if status in (401, 403):
            raise Unavailable(f"{where} answers {status}: headrace sends no key; start the engine without --api-key")
        if status == 503:
            raise Unavailable(f"{where} answers 503: it still loads, or stops; wait for its /health")
        text = " ".join(response.content[: 4 * _SHOWN].decode(errors="replace").split())[:_SHOWN]
        if status != 200:
            raise Unavailable(f"{where} answers {status} ({text}); see the engine's log")
        try:
            table = json.loads(response.content)
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise Unavailable(f"{where} answers 200 and no JSON object ({text}); is a proxy or another server there?")
        return table


def _cause(error: requests.RequestException) -> str:
    """The innermost reason in a few words: those of requests name objects and addresses in memory."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return getattr(cause, "strerror", None) or f"{type(cause).__name__}: {str(cause)[:_SHOWN]}"
