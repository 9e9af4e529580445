"""Samples: which lines end the run, which are rejected with a reason, and what each form means."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace_dispatcher.samples import (
    Conversation,
    Tokens,
    Unusable,
    decode_line,
    parse_sample,
    read_lines,
    sample_name,
)

PATH = Path("data.jsonl")
USER = {"role": "user", "content": "hi"}


def _lines(path: Path) -> list[tuple[int, bytes]]:
    return list(read_lines(path, hashlib.blake2b()))


def _reason(table: Any) -> tuple[str, str]:
    with pytest.raises(Unusable) as caught:
        parse_sample(table, 100)
    return caught.value.reason.value, str(caught.value)


def _conversation(table: Any) -> Conversation:
    form = parse_sample(table, 100)
    assert isinstance(form, Conversation)
    return form


def test_blank_lines_are_passed_over_and_numbers_count_them(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"a":1}\n\n  \t\r\n{"b":2}\r\n{"c":3}')
    assert _lines(path) == [(1, b'{"a":1}\n'), (4, b'{"b":2}\r\n'), (5, b'{"c":3}')]


def test_the_digest_takes_every_byte_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\n\n \n{"b":2}')
    digest = hashlib.blake2b()
    assert [number for number, _ in read_lines(path, digest)] == [1, 4]
    assert digest.digest() == hashlib.blake2b(path.read_bytes()).digest()


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\n')
    assert [decode_line(path, *line) for line in _lines(path)] == [{"a": 1}]


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.jsonl: No such file or directory"):
        _lines(tmp_path / "gone.jsonl")


def test_a_folder_in_the_place_of_a_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        _lines(tmp_path)


def test_a_file_without_line_breaks_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_dispatcher.samples.MAX_LINE", 20)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":"' + b"x" * 100 + b'"}\n')
    with pytest.raises(UsageError, match=r"data.jsonl:2: a line of over 20 bytes"):
        _lines(path)


@pytest.mark.parametrize("data", [b"{", b"{'a': 1}", b"[1,]", b"hello", b'{"a": NaN}', b'{"a":1} {"b":2}', b"\x00"])
def test_a_line_that_is_not_json_is_a_usage_error_with_its_number(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"data.jsonl:7: not JSON \(.+\); each line must be one JSON object"):
        decode_line(PATH, 7, data)


@pytest.mark.parametrize("data", [b'{"a":"\xff"}', '{"a":1}'.encode("utf-16")])
def test_a_line_that_is_not_utf8_is_a_usage_error_with_its_number(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"data.jsonl:3: not UTF-8 at byte \d+"):
        decode_line(PATH, 3, data)


@pytest.mark.parametrize("data", [rb'{"a":"\ud800"}', b"[" * 2000 + b"]" * 2000, b"[" * 100_000 + b"]" * 100_000])
def test_json_that_cannot_be_held_is_a_rejected_sample(data: bytes) -> None:
    with pytest.raises(Unusable) as caught:
        decode_line(PATH, 1, data)
    assert caught.value.reason == "unknown_form"


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"id": "a"}, "a"),
        ({"id": 7}, "7"),
        ({"id": ""}, ""),
        ({"id": None, "conversation_id": "c"}, "c"),
        ({"uuid": "u"}, "u"),
        ({"id": [1]}, "[1]"),
        ({"other": 1}, "12"),
        ([1], "12"),
        (None, "12"),
    ],
)
def test_a_sample_is_named_by_its_id_or_its_ordinal(table: Any, name: str) -> None:
    assert sample_name(table, 12) == name


def test_ready_token_ids_come_before_a_conversation() -> None:
    table = {"input_ids": [1, 99], "loss_mask": [0, 1], "messages": [USER]}
    assert parse_sample(table, 100) == Tokens(ids=[1, 99], mask=[0, 1])


def test_a_mask_may_be_booleans() -> None:
    assert parse_sample({"input_ids": [1, 2], "loss_mask": [False, True]}, 100) == Tokens(ids=[1, 2], mask=[0, 1])


@pytest.mark.parametrize(
    ("table", "reason", "says"),
    [
        ({"input_ids": [1, 100], "loss_mask": [0, 1]}, "vocabulary", "id 100 at position 1 is outside"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "vocabulary", "id -1 at position 1"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "mask_length", "1 values for 2 input_ids"),
        ({"input_ids": [], "loss_mask": []}, "empty", "input_ids is empty"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, "unknown_form", "input_ids[1] is a JSON boolean"),
        ({"input_ids": [1.0, 2], "loss_mask": [0, 1]}, "unknown_form", "input_ids[0] is a JSON fraction"),
        ({"input_ids": [1, "2"], "loss_mask": [0, 1]}, "unknown_form", "input_ids[1] is a JSON string"),
        ({"input_ids": [1, None], "loss_mask": [0, 1]}, "unknown_form", "input_ids[1] is a JSON null"),
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "unknown_form", "input_ids[0] is a JSON array"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "unknown_form", "loss_mask[1] is 2, neither 0 nor 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, -1]}, "unknown_form", "loss_mask[1] is -1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1.0]}, "unknown_form", "loss_mask[1] is a JSON fraction"),
        ({"input_ids": "1 2", "loss_mask": [0, 1]}, "unknown_form", "input_ids is a JSON string"),
        ({"input_ids": [1, 2]}, "unknown_form", "input_ids without loss_mask"),
        ({"text": "hello", "lang": "en"}, "unknown_form", "keys: lang, text"),
        ({}, "unknown_form", "keys: none"),
        ([1, 2], "unknown_form", "a JSON array, not an object"),
        ("hello", "unknown_form", "a JSON string, not an object"),
        (None, "unknown_form", "a JSON null, not an object"),
        ({"messages": []}, "empty", "messages is empty"),
        ({"conversations": []}, "empty", "conversations is empty"),
        ({"messages": "hello"}, "unknown_form", "messages is a JSON string"),
        ({"messages": [USER, "hello"]}, "unknown_form", "messages[1] is a JSON string"),
        ({"messages": [{"content": "hi"}]}, "unknown_form", "messages[0] has no role"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "unknown_form", "messages[0] has no role"),
        ({"messages": [{"role": "user"}]}, "unknown_form", "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "unknown_form", "a JSON integer as content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "unknown_form",
            "messages[0] has a part that is not text: 'image'",
        ),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "unknown_form", "not text: 'string'"),
        ({"conversations": [{"from": "moderator", "value": "x"}]}, "unknown_form", "from 'moderator'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "unknown_form", "conversations[0] is from"),
        ({"messages": [USER], "tools": "{"}, "unknown_form", "tools is text that is not JSON"),
        ({"messages": [USER], "tools": {"a": 1}}, "unknown_form", "tools is not a list of objects"),
    ],
)
def test_a_sample_that_cannot_be_used_has_a_reason(table: Any, reason: str, says: str) -> None:
    found, detail = _reason(table)
    assert found == reason
    assert says in detail


def test_an_id_too_large_for_an_integer_is_rejected() -> None:
    table = decode_line(PATH, 1, b'{"input_ids":[123456789012345678901234567890],"loss_mask":[1]}')
    assert _reason(table)[0] == "unknown_form"


def test_sharegpt_turns_become_messages() -> None:
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "w": 1}]
    assert _conversation({"conversations": turns}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "w": 1},
    ]


def test_conversations_with_roles_are_messages() -> None:
    assert _conversation({"conversations": [USER]}) == _conversation({"messages": [USER]})


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _conversation({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "ab"


def test_tool_calls_and_tools_go_to_the_template_as_they_are() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls, "name": None}
    form = _conversation({"messages": [USER, message], "tools": tools})
    assert form.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert form.tools == tools
    assert _conversation({"messages": [USER], "tools": json.dumps(tools)}).tools == tools


@pytest.mark.parametrize("tools", [None, [], "[]", "null"])
def test_no_tools_are_none(tools: Any) -> None:
    assert _conversation({"messages": [USER], "tools": tools}).tools is None


def test_null_keys_of_table_formats_count_as_absent() -> None:
    table = {"input_ids": None, "loss_mask": None, "messages": None, "conversations": [USER]}
    assert _conversation(table).messages == [USER]
