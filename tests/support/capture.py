"""Random prompts with their states, forwards made of their rows, and checks of what was published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from headrace.dumpfolder import read_dump, read_lost
from headrace.dumps import CHECKSUM_PREFIX, LOST_SUFFIX, PRE_NORM, DumpHeader, Lost
from headrace.ids import RequestId
from headrace.verdicts import Match, Requirement, judge
from headrace_capture.config import CaptureConfig
from headrace_capture.core import Capture
from headrace_capture.folder import Folder
from headrace_capture.forward import Forward, Piece

BOUNDARIES = (2, 4, 5)
HIDDEN = 16
WEIGHTS = "weights-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and its states: `boundaries` k tensors [N, D], `final` [N, D]."""

    rid: str
    token_ids: torch.Tensor
    boundaries: tuple[torch.Tensor, ...]
    final: torch.Tensor

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def request(self) -> RequestId:
        return RequestId.parse(self.rid)


def prompt(
    tokens: int, *, ordinal: int = 0, rid: str | None = None, run: str = "run", dtype: torch.dtype = torch.bfloat16
) -> Prompt:
    """A prompt of random ids; `rid` for one that is not ours."""
    generator = torch.Generator().manual_seed(1000 * ordinal + tokens)
    ids = torch.randint(0, 50_000, (tokens,), generator=generator)
    states = torch.randn(len(BOUNDARIES) + 1, tokens, HIDDEN, generator=generator).to(dtype)
    return Prompt(
        rid=rid or str(RequestId.make(run, ordinal, "abcd0123", ids.tolist())),
        token_ids=ids,
        boundaries=tuple(states[:-1]),
        final=states[-1],
    )


def forward_of(
    rows: Sequence[tuple[Prompt, int, int]],
    *,
    decode: Sequence[Prompt] = (),
    padding: int = 0,
    weight_version: str = WEIGHTS,
    device: str = "cpu",
) -> Forward:
    """A forward of (prompt, first row, end row) pieces, then decode rows, then padding rows of NaN."""
    pieces = [Piece(rid=p.rid, prompt_tokens=p.tokens, prefix=begin, rows=end - begin) for p, begin, end in rows]
    pieces += [Piece(rid=p.rid, prompt_tokens=p.tokens, prefix=p.tokens, rows=1) for p in decode]
    extra = len(decode) + padding
    dtype, count = rows[0][0].final.dtype if rows else decode[0].final.dtype, len(BOUNDARIES)

    def gather(parts: list[torch.Tensor], tail: torch.Tensor) -> torch.Tensor:
        return torch.cat([*parts, tail]).to(device)

    junk = torch.full((extra, HIDDEN), float("nan"), dtype=dtype)
    return Forward(
        pieces=tuple(pieces),
        token_ids=gather([p.token_ids[b:e] for p, b, e in rows], torch.zeros(extra, dtype=torch.int64)),
        boundaries=tuple(gather([p.boundaries[k][b:e] for p, b, e in rows], junk) for k in range(count)),
        final=gather([p.final[b:e] for p, b, e in rows], junk),
        weight_version=weight_version,
    )


def start_capture(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    buffer_bytes: int = 1 << 20,
    writers: int = 2,
    deadline_seconds: float = 60.0,
    max_wait_seconds: float = 5.0,
    remember: int = 1000,
    hidden_size: int = HIDDEN,
    norm_weight: torch.Tensor | None = None,
    device: str = "cpu",
    open_folder: Callable[[Path, str], Folder] = Folder,
) -> Capture:
    """A capture whose wait for the buffer is long enough never to matter."""
    config = CaptureConfig(
        dump_dir=folder,
        buffer_bytes=buffer_bytes,
        writers=writers,
        deadline_seconds=deadline_seconds,
        max_wait_seconds=max_wait_seconds,
        remember=remember,
    )
    return Capture(
        config,
        model="tiny",
        fingerprint="engine 1.0 tiny bf16 tp1",
        weight_version=WEIGHTS,
        boundaries=BOUNDARIES,
        final_state=PRE_NORM,
        layers=8,
        hidden_size=hidden_size,
        dtype=dtype,
        norm_weight=norm_weight,
        norm_eps=1e-5,
        device=device,
        open_folder=open_folder,
    )


def dump_path(folder: Path, wanted: Prompt) -> Path:
    return folder / f"{wanted.rid}.safetensors"


def assert_published(folder: Path, wanted: Prompt) -> DumpHeader:
    """The dump holds the prompt's rows bit for bit, its checksum is right and its verdict a match."""
    path = dump_path(folder, wanted)
    dump = read_dump(path)
    requirement = Requirement(boundaries=BOUNDARIES, final_state=PRE_NORM, hidden_size=HIDDEN, identity=None)
    verdict = judge(dump, wanted.request, requirement)
    assert isinstance(verdict, Match), verdict
    with safe_open(path, framework="pt") as tensors:
        assert torch.equal(tensors.get_tensor("token_ids"), wanted.token_ids)
        assert torch.equal(tensors.get_tensor("aux"), torch.cat(wanted.boundaries, dim=1))
        assert torch.equal(tensors.get_tensor("final"), wanted.final)
        assert tensors.get_tensor("token_ids").dtype == torch.int64
    data = path.read_bytes()[dump.data_offset :]
    assert dump.header.checksum == CHECKSUM_PREFIX + xxhash.xxh3_64_hexdigest(data)
    assert path.stat().st_mode & 0o7777 == 0o640
    return dump.header


def lost(folder: Path, wanted: Prompt) -> Lost:
    """The notice of a request that was lost, of which there is no dump."""
    assert not dump_path(folder, wanted).exists()
    return read_lost(folder / f"{wanted.rid}{LOST_SUFFIX}")


def leftovers(folder: Path) -> list[str]:
    """Hidden files other than the boot's lock."""
    return [p.name for p in folder.iterdir() if p.name.startswith(".") and not p.name.endswith(".lock")]
