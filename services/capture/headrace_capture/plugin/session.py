"""What the hooks of one process do: they follow batches, forwards, aborts and weights, and hand them to the core."""

from __future__ import annotations

import logging
from typing import Any

import torch

from headrace.ids import is_ours
from headrace_capture.core import Capture
from headrace_capture.forward import Forward, Piece
from headrace_capture.plugin.boundaries import set_boundaries
from headrace_capture.plugin.facts import Server
from headrace_capture.plugin.settings import FINAL_STATE, PluginSettings
from headrace_capture.plugin.states import States
from headrace_capture.plugin.target import Target, open_target

logger = logging.getLogger("headrace.capture")

INFO = "headrace"  # the field of a response's meta_info
_OURS = "hr-"  # how the ids begin that are worth a closer look
_REMEMBERED = 1024  # drops (said again with the last chunk, whose answer alone is read), half-prefilled requests
_ROWS_OF_PROMPTS = ("EXTEND", "MIXED")
_NO_PROMPTS = ("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2", "PREBUILT")
_NORM_CHANGED = "the weights were updated, and the final norm with them, which the engine declared; restart the engine"


class Session:
    """The hooks' common state; all of them run in the scheduler's thread.

    `model_loaded` and `model_ready` raise, and then nothing is captured. The others must not end the server.
    """

    def __init__(self, settings: PluginSettings) -> None:
        self.dump_dir = settings.capture.dump_dir
        self._settings = settings
        self._target: Target | None = None
        self.capture: Capture | None = None  # open on the rank that captures, once the model is there
        self._prompts: dict[str, int] = {}  # of the batch that runs: the prompt's length, by id of ours
        self._version = self._weights = ""
        self._updates = 0
        self._norm_unsure = False
        self._norm_changed = False
        self._drops: dict[str, str] = {}
        self._unfinished: dict[str, None] = {}  # ids of ours of whose prompt some rows were computed, and not the last

    def model_loaded(self, runner: Any, server: Server) -> None:
        """The target model is there.

        Raises:
            UsageError: the server's arguments, the model or the dump folder do not allow capture.
        """
        self._target = open_target(self._settings, runner, server, lambda: bool(self._prompts))
        self.capture = self._target.capture
        self._version = self._weights = server.weight_version

    def model_ready(self, runner: Any) -> None:
        """SGLang has chosen layers of its own since the load, if it was told to: ours are set again.

        Raises:
            UsageError: the model does not take them any more.
        """
        if self._target is not None and runner is self._target.runner:
            set_boundaries(runner.model, self._target.boundaries)

    def close(self, timeout: float = 5.0) -> None:
        """Capture nothing from now on."""
        capture, self.capture = self.capture, None
        if capture is not None:
            capture.close(timeout)

    def batch_begins(self, batch: Any) -> None:
        """The scheduler runs a batch: keep the real prompt lengths of its requests of ours."""
        if self.capture is not None and batch.forward_mode.name not in _NO_PROMPTS:
            self._prompts = {
                request.rid: _prompt_tokens(request)
                for request in batch.reqs
                if request.rid.startswith(_OURS) and is_ours(request.rid)
            }

    def batch_ends(self) -> None:
        """No forward until the next batch is of a request: what runs then are graph captures and warm-ups."""
        if self._prompts:
            self._prompts = {}

    def forward_begins(self) -> None:
        """A forward of any model begins."""
        if self._target is not None:
            self._target.source.clear()
            if self._target.tap is not None:
                self._target.tap.clear()

    def logits_input(self, hidden_states: Any, aux_hidden_states: Any, before_norm: Any) -> None:
        """The logits processor is called."""
        if self._prompts and self._target is not None:
            self._target.source.keep(hidden_states, aux_hidden_states, before_norm)

    def forward_ended(self, runner: Any, batch: Any, output: Any) -> None:
        """A forward was launched: capture the rows of ours, and say in the answer which cannot be. Never raises."""
        target, capture = self._target, self.capture
        if not self._prompts or target is None or capture is None or runner is not target.runner or not batch.rids:
            return
        pieces: tuple[Piece, ...] = ()
        try:
            mode = batch.forward_mode.name
            if mode in _NO_PROMPTS:
                return
            pieces = self._pieces(batch)
            self._follow(pieces)
            problem = self._problem(mode)
            dropped = capture.refuse(pieces, problem) if problem else self._take(target, batch, output, pieces)
            self._answer(dropped, pieces, output)
        except Exception as error:  # the engine must survive whatever goes wrong here
            logger.exception("capturing a forward")
            self._give_up(pieces, f"capturing a forward: {type(error).__name__}: {error}")

    def is_of_a_request(self, key: Any) -> bool:
        """Whether a field of answers holds what is said of a request as a whole.

        SGLang takes every other field for a value per output token, of which a prefill-only request has none: a server
        that does not ask (before 0.5.23) answers with an empty list, and that a request was dropped is only in its
        notice.
        """
        return bool(key == INFO)

    def aborted(self, request: Any) -> None:
        """The scheduler is told to abort: it takes every request whose id begins so, or all."""
        if self.capture is None or not self._unfinished:
            return
        start = str(request.rid or "")
        for rid in [rid for rid in self._unfinished if request.abort_all or rid.startswith(start)]:
            del self._unfinished[rid]
            self.capture.abort(rid)

    def weights_change(self) -> None:
        """Weights are about to be written, perhaps in vain and perhaps in part: from now on they have another name."""
        self._updates += 1
        self._weights = f"{self._version}+{self._updates}"
        self._norm_unsure = True

    def _take(self, target: Target, batch: Any, output: Any, pieces: tuple[Piece, ...]) -> dict[str, str]:
        assert target.capture is not None, "the caller captures"
        states = None if output is None else target.source.take(output)
        if states is None:
            detail = f"no states came from SGLang's {target.source.name}: a replayed graph, or a path of its own"
            return target.capture.refuse(pieces, detail)
        final = _final(target, states)
        if final is None:
            detail = f"the final norm was not called: a replayed graph, or a path of its own; set {FINAL_STATE}"
            return target.capture.refuse(pieces, detail)
        return target.capture.forward(
            Forward(
                pieces=pieces,
                token_ids=batch.input_ids,
                boundaries=states.boundaries,
                final=final,
                weight_version=self._weights,
            )
        )

    def _problem(self, mode: str) -> str:
        """Why this forward's rows cannot be captured, or empty."""
        if mode not in _ROWS_OF_PROMPTS:
            return f"a forward of kind {mode} is not captured"
        if self._norm_unsure:
            norm = None if self._target is None else self._target.norm
            self._norm_changed, self._norm_unsure = norm is not None and not norm.holds(), False
        return _NORM_CHANGED if self._norm_changed else ""

    def _pieces(self, batch: Any) -> tuple[Piece, ...]:
        """The forward's requests in row order; what padding adds behind them is nobody's."""
        rids, prefixes, lengths = batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        if len(prefixes) < len(rids) or len(lengths) < len(rids):
            raise ValueError(f"{len(rids)} requests have {len(prefixes)} prefixes and {len(lengths)} lengths")
        prompts = self._prompts
        return tuple(
            Piece(rid=rid, prompt_tokens=prompts.get(rid, 0), prefix=int(prefix), rows=int(rows))
            for rid, prefix, rows in zip(rids, prefixes, lengths, strict=False)
        )

    def _follow(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            if piece.prefix + piece.rows < piece.prompt_tokens:
                self._unfinished[piece.rid] = None
            elif self._unfinished:
                self._unfinished.pop(piece.rid, None)
        _bound(self._unfinished)

    def _give_up(self, pieces: tuple[Piece, ...], detail: str) -> None:
        if not pieces:
            pieces = tuple(
                Piece(rid=rid, prompt_tokens=tokens, prefix=0, rows=1) for rid, tokens in self._prompts.items()
            )
        if self.capture is not None:
            self.capture.refuse(pieces, detail)

    def _answer(self, dropped: dict[str, str], pieces: tuple[Piece, ...], output: Any) -> None:
        if not dropped and not self._drops:
            return
        self._drops.update(dropped)
        _bound(self._drops)
        column = [self._drops.get(piece.rid) for piece in pieces]
        if output is not None and any(column):
            output.customized_info = {**(output.customized_info or {}), INFO: column}


def _prompt_tokens(request: Any) -> int:
    """A request's prompt length; 0 when SGLang refused it, and computes one token 0 under its id instead."""
    tokens = len(request.origin_input_ids)
    return 0 if tokens == 1 and getattr(request, "to_finish", None) is not None else tokens


def _final(target: Target, states: States) -> torch.Tensor | None:
    return states.post_norm if target.tap is None else target.tap.take()


def _bound(remembered: dict[str, Any]) -> None:
    while len(remembered) > _REMEMBERED:
        del remembered[next(iter(remembered))]
