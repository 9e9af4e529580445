"""Makes of one line of a JSONL file one entry of the inputs: a sample of ids and mask, or a rejection."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import UsageError
from headrace.masks import encode_mask, trained_tokens
from headrace_dispatcher.checkpoint import Checkpoint
from headrace_dispatcher.inputs import RejectedSample, Sample
from headrace_dispatcher.render import Renderer, load_tokenizer, too_long
from headrace_dispatcher.runfile import RunFile
from headrace_dispatcher.samples import (
    SampleReason,
    Tokens,
    Unusable,
    check_vocabulary,
    decode_line,
    parse_sample,
    sample_name,
)
from headrace_dispatcher.template import ChatTemplate

# A template's message may quote a whole conversation.
_LONGEST_DETAIL = 300


class Normaliser:
    """Normalises the lines of one run; tokenizer and template are loaded when the first conversation needs them."""

    def __init__(self, run_file: RunFile, checkpoint: Checkpoint) -> None:
        """Normalise for a run and the checkpoint of its model."""
        self._run_file = run_file
        self._checkpoint = checkpoint
        self._renderer: Renderer | None = None

    def normalise(self, ordinal: int, path: Path, number: int, data: bytes) -> Sample | RejectedSample:
        """Normalise the line `number` of the file `path`.

        Raises:
            UsageError: the line is not JSON, or the checkpoint lacks what conversations need.
        """
        name = str(ordinal)
        try:
            table = decode_line(path, number, data)
            name = sample_name(table, ordinal)
            ids, mask = self._tokens(table)
        except Unusable as error:
            detail = " ".join(str(error).split())[:_LONGEST_DETAIL]
            return RejectedSample(ordinal=ordinal, sample=name, reason=error.reason.value, detail=detail)
        return Sample(ordinal=ordinal, sample=name, ids=tuple(ids), mask=mask)

    def _tokens(self, table: object) -> tuple[list[int], tuple[int, ...]]:
        form = parse_sample(table, self._checkpoint.vocab_size)
        if isinstance(form, Tokens):
            ids, mask = form.ids, encode_mask(form.mask)
            if len(ids) > self._run_file.max_length:
                raise too_long(len(ids), self._run_file.max_length)
        else:
            if self._renderer is None:
                self._renderer = self._load()
            ids, rendered = self._renderer.render(form)
            check_vocabulary(ids, self._checkpoint.vocab_size)
            mask = encode_mask(rendered)
        if not trained_tokens(mask):
            raise Unusable(SampleReason.NO_TRAINED_TOKENS, f"the loss mask is 0 for all {len(ids)} tokens")
        return ids, mask

    def _load(self) -> Renderer:
        checkpoint, run_file = self._checkpoint, self._run_file
        if checkpoint.tokenizer is None:
            raise UsageError(_no_tokenizer(checkpoint.folder, run_file.trust_remote_code))
        if checkpoint.template is None:
            raise UsageError(f"{checkpoint.folder} has no chat template; name a jinja file as run.chat_template")
        return Renderer(
            ChatTemplate(checkpoint.template, str(checkpoint.template_path), checkpoint.special_tokens),
            load_tokenizer(checkpoint.tokenizer, str(checkpoint.folder / "tokenizer.json")),
            run_file.mask,
            run_file.max_length,
        )


def _no_tokenizer(folder: Path, trusted: bool) -> str:
    trust = "trust_remote_code, which the run sets, does not change this; " if trusted else ""
    return (
        f"{folder} has no tokenizer.json, and a checkpoint's own code is not run here; {trust}save one beside the "
        "model with transformers (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), with "
        "trust_remote_code=True if you trust its code), or hand in input_ids with loss_mask"
    )
