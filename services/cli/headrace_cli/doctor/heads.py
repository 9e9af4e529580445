"""Multiplies the last final state of each row with the model's head, for the server's next tokens to be ranked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.dumpfolder import read_norm
from headrace.dumps import POST_NORM, PRE_NORM
from headrace.finalnorm import NORM_FILE, FinalNorm
from headrace.runs import RunSpec
from headrace.tensorfile import TensorInfo
from headrace_cli.doctor.findings import Finding
from headrace_cli.doctor.prompts import Prompt
from headrace_cli.doctor.ranks import Last, judge
from headrace_cli.doctor.rows import read_row
from headrace_cli.verify.head import Head
from headrace_writer.formats.base import States, as_float32
from headrace_writer.formats.rmsnorm import normalise


def next_tokens(spec: RunSpec, prompts: Sequence[Prompt], checkpoint: Path) -> Finding:
    """Whether each row's last final state leads to the token that the server says comes next.

    The norm is the one that the engine published with the run, or else the checkpoint's.

    Raises:
        UsageError: the checkpoint's head cannot be read.
        Unreadable: a row or the norm cannot be read.
    """
    norm = _published_norm(spec)
    by_checkpoint = spec.final_state == PRE_NORM and norm is None
    head = Head(checkpoint, spec.hidden_size, PRE_NORM if by_checkpoint else POST_NORM)
    rows, dtype = [], ""
    for ordinal, prompt in enumerate(prompts):
        last = _last(read_row(spec, ordinal).final)
        dtype = last.info.dtype
        if norm is not None:
            last = States(info=last.info, buffer=memoryview(b"".join(normalise(norm, last))))
        logits = head.logits(torch.from_numpy(as_float32(last.info, last.buffer).copy()))
        rows.append(Last(tokens=len(prompt.token_ids), logits=logits[0].numpy(), next_token=prompt.next_token))
    return judge(rows, dtype)


def _published_norm(spec: RunSpec) -> FinalNorm | None:
    if spec.final_state != PRE_NORM:
        return None
    try:
        return read_norm(Path(spec.output) / NORM_FILE)
    except FileNotFoundError:
        return None


def _last(states: States) -> States:
    """The last of states [N, D], as [1, D]."""
    tokens, width = states.info.shape
    size = len(states.buffer) // tokens
    info = TensorInfo(dtype=states.info.dtype, shape=(1, width), begin=0, end=size)
    return States(info=info, buffer=states.buffer[-size:])
