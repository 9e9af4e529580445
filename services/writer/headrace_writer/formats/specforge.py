"""The `specforge` format: the EAGLE-3 record of SpecForge's offline training, one file per row for `torch.load`.

Source: `OfflineEagle3Dataset` and `list_local_files` in specforge/data/preprocessing.py,
https://github.com/sgl-project/SpecForge.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import PurePosixPath

from headrace.dumps import POST_NORM
from headrace.errors import Unreadable
from headrace.tensorfile import TensorInfo
from headrace_writer.formats.base import (
    STATE_DTYPES,
    Format,
    Row,
    RowSource,
    States,
    decode_loss_mask,
    encode_loss_mask,
)
from headrace_writer.formats.origin import decode_origin, encode_origin, whole
from headrace_writer.formats.torchfile import Archive, Piece, Tensor, write_archive

ROWS_PER_FOLDER = 2000
# A record that torch passes over: the dict holds what SpecForge asks for and nothing else.
_NOTE = "headrace.json"


class SpecforgeFormat(Format):
    """`rows/rows_{g}-{g+2000}/data_{ordinal}.ckpt`, g the ordinal's multiple of 2000.

    A dict of `input_ids` and `loss_mask` int64 [N], `aux_hidden_state` [1, N, 3*D] with boundaries low to high, and
    `hidden_state` [1, N, D], post-norm; the last two in the dtype of the dump. Nothing is shifted or padded.
    """

    name = "specforge"

    def path(self, ordinal: int) -> PurePosixPath:
        """The row's file, relative to the dataset's folder."""
        first = ordinal // ROWS_PER_FOLDER * ROWS_PER_FOLDER
        return PurePosixPath(f"rows/rows_{first}-{first + ROWS_PER_FOLDER}/data_{ordinal}.ckpt")

    def write(self, source: RowSource, file: io.RawIOBase) -> None:
        """Stream one row; raises NotFinite."""
        tokens, hidden_size = source.final.info.shape
        boundaries = len(source.header.boundaries)
        note = {
            **encode_origin(source, POST_NORM),
            "captured": source.header.final_state,
            "dtype": source.final.info.dtype,
            "tokens": str(tokens),
            "hidden_size": str(hidden_size),
        }
        pieces: tuple[Iterable[Piece], ...] = (
            [source.token_ids],
            [encode_loss_mask(source.mask)],
            [source.aux.buffer],
            _post_norm(source),
        )
        tensors = _tensors(tokens, boundaries, hidden_size, source.final.info.dtype)
        write_archive(file, list(zip(tensors, pieces, strict=True)), {_NOTE: json.dumps(note).encode()})

    def parse(self, name: str, data: memoryview) -> Row:
        """Read a row back from a map of its whole file; raises Unreadable."""
        archive = Archive(data, {_NOTE})
        note = _note(archive)
        origin = decode_origin(note)
        try:
            tokens, hidden_size, dtype = whole(note["tokens"]), whole(note["hidden_size"]), note["dtype"]
        except (KeyError, ValueError) as error:
            raise Unreadable(f"{name}: {_NOTE}: {type(error).__name__}: {error}") from error
        if dtype not in STATE_DTYPES or tokens < 1 or hidden_size < 1:
            raise Unreadable(f"{name}: {_NOTE} says {tokens} tokens of {hidden_size} {dtype[:40]!r}")
        boundaries = len(origin.boundaries)
        ids, mask, aux, final = archive.tensors(_tensors(tokens, boundaries, hidden_size, dtype))
        return Row(
            token_ids=bytes(ids),
            loss_mask=decode_loss_mask(mask),
            aux=_states(aux, dtype, (tokens, boundaries * hidden_size)),
            final=_states(final, dtype, (tokens, hidden_size)),
            origin=origin,
        )

    def check_sums(self, name: str, data: memoryview) -> None:
        """Compare each record with the sum that the archive has of it; raises Unreadable."""
        Archive(data, {_NOTE}).check_sums()


def _tensors(tokens: int, boundaries: int, hidden_size: int, dtype: str) -> tuple[Tensor, ...]:
    return (
        Tensor(name="input_ids", dtype="I64", shape=(tokens,)),
        Tensor(name="loss_mask", dtype="I64", shape=(tokens,)),
        Tensor(name="aux_hidden_state", dtype=dtype, shape=(1, tokens, boundaries * hidden_size)),
        Tensor(name="hidden_state", dtype=dtype, shape=(1, tokens, hidden_size)),
    )


def _post_norm(source: RowSource) -> Iterable[Piece]:
    if source.header.final_state == POST_NORM:
        return [source.final.buffer]
    assert source.norm is not None  # the store takes no job of such a run without one
    # Torch is of use here alone: a run that captures post-norm, and every reader, go without.
    from headrace_writer.formats.rmsnorm import normalise

    return normalise(source.norm, source.final)


def _note(archive: Archive) -> dict[str, str]:
    try:
        note = json.loads(archive.note(_NOTE))
        json.dumps(note, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair, which no store takes
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{_NOTE} is not JSON: {error}") from error
    if not isinstance(note, dict) or not all(isinstance(value, str) for value in note.values()):
        raise Unreadable(f"{_NOTE} is not an object of strings")
    return note


def _states(data: memoryview, dtype: str, shape: tuple[int, ...]) -> States:
    return States(info=TensorInfo(dtype=dtype, shape=shape, begin=0, end=len(data)), buffer=data)
