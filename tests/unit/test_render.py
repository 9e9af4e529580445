"""Rendering: ids as transformers makes them, and masks that hold the assistant's tokens and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from headrace.errors import UsageError
from headrace_dispatcher.render import Renderer, load_tokenizer, mask_tokens, without_trailing_space
from headrace_dispatcher.runfile import MaskRule
from headrace_dispatcher.samples import Conversation, Unusable
from headrace_dispatcher.template import ChatTemplate
from tests.support.checkpoints import CHATML, CHATML_MARKED, small_checkpoint, tokenizer_json

TOKENIZER = load_tokenizer(tokenizer_json(), "tokenizer.json")
MARKED, UNMARKED = (ChatTemplate(source, "test", {}) for source in (CHATML_MARKED, CHATML))
# One character of these is several tokens of the small tokenizer.
SCRIPTS = "Grüße 😀👩‍👩‍👧 مرحبا بالعالم 你好，世界 नमस्ते"
ROLES = st.sampled_from(["system", "user", "assistant"])
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1"), max_size=12),
    st.sampled_from(["", "\n", "  \n\n ", SCRIPTS, " lead", "trail \n", "<|im_end|>"]),
)


def _talk(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], rule: MaskRule = "assistant", max_length: int = 4096
) -> tuple[list[int], bytes]:
    return Renderer(template, TOKENIZER, rule, max_length).render(Conversation(messages=messages, tools=None))


def _trained(ids: list[int], mask: bytes) -> str:
    return TOKENIZER.decode([token for token, on in zip(ids, mask, strict=True) if on], skip_special_tokens=False)


def _refusal(template: ChatTemplate, messages: list[dict[str, Any]], rule: MaskRule = "assistant") -> tuple[str, str]:
    with pytest.raises(Unusable) as caught:
        _render(template, messages, rule)
    return caught.value.reason.value, str(caught.value)


@pytest.mark.parametrize("template", [UNMARKED, MARKED])
def test_the_mask_holds_each_answer_with_its_end_and_no_white_space_after(template: ChatTemplate) -> None:
    messages = _talk(("user", "Why?"), ("assistant", "Because.\n"), ("user", SCRIPTS), ("assistant", SCRIPTS))
    ids, mask = _render(template, messages)
    assert _trained(ids, mask) == f"Because.\n<|im_end|>{SCRIPTS}<|im_end|>"
    assert mask[-1] == 0
    assert TOKENIZER.decode(ids[-2:], skip_special_tokens=False) == "<|im_end|>\n"


@pytest.mark.parametrize("template", [UNMARKED, MARKED])
def test_a_mask_of_the_last_answer_leaves_the_earlier_ones_out(template: ChatTemplate) -> None:
    messages = _talk(("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"), ("user", "c"))
    ids, mask = _render(template, messages, "last_assistant")
    assert _trained(ids, mask) == "two<|im_end|>"


@pytest.mark.parametrize("template", [UNMARKED, MARKED])
def test_a_mask_of_all_needs_no_answer(template: ChatTemplate) -> None:
    ids, mask = _render(template, _talk(("user", "a")), "all")
    assert mask == b"\x01" * len(ids)


@given(st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6).map(lambda turns: _talk(*turns)))
def test_markers_and_incremental_rendering_give_the_same_mask(messages: list[dict[str, Any]]) -> None:
    outcomes: list[Any] = []
    for template in (UNMARKED, MARKED):
        try:
            outcomes.append(_render(template, messages))
        except Unusable as error:
            outcomes.append(error.reason)
    if messages[0]["role"] == "assistant":
        # Nothing comes before the first turn, so only markers can tell where it begins.
        assert outcomes[0] == "unrenderable"
    else:
        assert outcomes[0] == outcomes[1]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_tokens_of_the_mask_spell_the_answer(answer: str) -> None:
    ids, mask = _render(UNMARKED, _talk(("user", "q"), ("assistant", answer)))
    # A line break before the answer may be one token with those that the answer begins with.
    assert _trained(ids, mask) in (f"{answer}<|im_end|>", f"\n{answer}<|im_end|>")


@pytest.mark.parametrize("answer", ["plain words", SCRIPTS, "\n\n  indented\n", "", "def f():\n\treturn '\u00e9'\r\n"])
def test_ids_and_mask_are_those_of_transformers(tmp_path: Path, answer: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(small_checkpoint(tmp_path / "model"))
    messages = _talk(
        ("system", "Be brief."), ("user", SCRIPTS), ("assistant", answer), ("user", "?"), ("assistant", "x")
    )
    expected = theirs.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        chat_template=CHATML_MARKED,
    )
    for template in (UNMARKED, MARKED):
        ids, mask = _render(template, messages)
        assert ids == list(expected["input_ids"])
    assert ids == list(theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])
    assert list(mask) == list(expected["assistant_masks"])


def test_a_conversation_without_an_answer_trains_nothing() -> None:
    assert _refusal(UNMARKED, _talk(("user", "a"))) == ("no_trained_tokens", "no assistant turn")


def test_a_longer_text_than_the_run_takes_is_rejected_and_not_cut() -> None:
    messages = _talk(("user", "a"), ("assistant", "b"))
    ids, _ = _render(UNMARKED, messages)
    assert _render(UNMARKED, messages, max_length=len(ids))[0] == ids
    with pytest.raises(Unusable, match=f"{len(ids)} tokens, more than max_length {len(ids) - 1}") as caught:
        _render(UNMARKED, messages, max_length=len(ids) - 1)
    assert caught.value.reason == "too_long"


def test_a_template_that_changes_earlier_turns_is_said_to_be_unstable() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(source, "test", {})
    one = _talk(("user", "a"), ("assistant", "b"))
    ids, mask = _render(template, one)
    assert _trained(ids, mask) == "<think></think>b<|im_end|>"
    reason, detail = _refusal(template, one + _talk(("user", "c"), ("assistant", "d")))
    assert reason == "unrenderable"
    assert "not prefix-stable" in detail
    assert "{% generation %}" in detail


def test_a_template_whose_prompt_opens_otherwise_than_the_turn_is_said_to_be_unstable() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
    )
    reason, detail = _refusal(ChatTemplate(source, "test", {}), _talk(("user", "a"), ("assistant", "b")))
    assert (reason, "not prefix-stable" in detail) == ("unrenderable", True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(10000000) | list | length }}",
        f"{{{{ 'x' * {1 << 62} }}}}",
        f"{{{{ '%{1 << 62}d' | format(1) }}}}",
        f"{{% generation %}}{{{{ 'x' * {1 << 62} }}}}{{% endgeneration %}}",
    ],
)
def test_a_template_that_fails_rejects_the_sample(source: str) -> None:
    reason, detail = _refusal(ChatTemplate(source, "test", {}), _talk(("user", "a"), ("assistant", "b")))
    assert reason == "unrenderable"
    assert detail.startswith("the chat template failed: ")


def test_a_template_of_wrong_syntax_is_a_usage_error_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"t.jinja: line 2: .*; mend the chat template"):
        ChatTemplate("a\n{% if %}", "t.jinja", {})


def test_an_empty_text_is_an_empty_sample() -> None:
    assert _refusal(ChatTemplate("", "test", {}), _talk(("assistant", "b")))[0] == "empty"


def test_the_environment_is_the_one_that_templates_expect() -> None:
    source = (
        "{{ bos_token }}{{ missing }}\n"
        "    {% for m in messages %}\n"
        "{{ m.content | tojson }}{% break %}\n"
        "    {% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ tools | tojson(indent=1) }}"
    )
    template = ChatTemplate(source, "test", {"bos_token": "<s>"})
    text = template.render(_talk(("user", "<é&'>"), ("user", "b")), [{"a": "é"}])
    assert text == '<s>\n"<é&\'>"4[\n {\n  "a": "é"\n }\n]'


def test_markers_inside_a_macro_are_where_the_text_comes_out() -> None:
    source = (
        "{% macro turn(m) %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ '\n' }}{% else %}U:{{ m.content ~ '\n' }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    ids, mask = _render(ChatTemplate(source, "test", {}), _talk(("user", "q"), ("assistant", "yes"), ("user", "z")))
    assert TOKENIZER.decode(ids) == "U:q\nA:yes\nU:z\n"
    assert _trained(ids, mask) == "yes"


def test_marked_text_that_the_template_changes_is_rejected() -> None:
    source = (
        "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}{{ x | trim }}"
        "{{ x | length }}"
    )
    reason, detail = _refusal(ChatTemplate(source, "test", {}), _talk(("assistant", "b")))
    assert reason == "unrenderable"
    assert "markers" in detail


def test_the_reserved_marks_in_a_text_reject_it() -> None:
    assert _refusal(MARKED, _talk(("user", "\ufdd0"), ("assistant", "b")))[0] == "unrenderable"


def test_a_tokenizers_own_truncation_and_padding_are_off() -> None:
    tokenizer = Tokenizer.from_buffer(tokenizer_json())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    mended = load_tokenizer(tokenizer.to_str().encode(), "tokenizer.json")
    assert mended.encode("some longer text", add_special_tokens=False).ids == TOKENIZER.encode("some longer text").ids


def test_what_is_no_tokenizer_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"m/tokenizer.json: not a tokenizer"):
        load_tokenizer(b'{"version": "1.0"}', "m/tokenizer.json")


def test_a_split_character_of_a_byte_fallback_tokenizer_is_masked_whole() -> None:
    vocab = {"<unk>": 0, "▁": 1, "a": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    encoding = load_tokenizer(tokenizer.to_str().encode(), "t").encode("a 世a", add_special_tokens=False)
    assert len(encoding.ids) == 6
    assert list(mask_tokens(encoding.offsets, [(2, 3)])) == [0, 0, 1, 1, 1, 0]


def test_a_token_that_overlaps_a_span_is_masked_and_one_that_touches_it_is_not() -> None:
    offsets = [(0, 2), (2, 4), (4, 4), (4, 6), (6, 9)]
    assert list(mask_tokens(offsets, [(2, 4)])) == [0, 1, 0, 0, 0]
    assert list(mask_tokens(offsets, [(3, 7)])) == [0, 1, 1, 1, 1]
    assert list(mask_tokens(offsets, [(0, 1), (8, 9)])) == [1, 0, 0, 0, 1]
    assert list(mask_tokens(offsets, [])) == [0] * 5


def test_spans_that_touch_are_one_before_white_space_is_taken_off() -> None:
    assert without_trailing_space("ab cd \n", [(0, 3), (3, 7)]) == [(0, 5)]
    assert without_trailing_space("ab \n cd", [(0, 4), (3, 4), (5, 7)]) == [(0, 2), (5, 7)]
    assert without_trailing_space("a  b", [(1, 3)]) == []


def test_special_tokens_are_single_ids() -> None:
    ids, _ = _render(UNMARKED, _talk(("user", "a"), ("assistant", "b")))
    table = json.loads(tokenizer_json())
    special = {entry["content"]: entry["id"] for entry in table["added_tokens"]}
    assert ids[0] == special["<|im_start|>"]
    assert ids.count(special["<|im_end|>"]) == 3
