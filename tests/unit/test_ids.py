from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace.errors import InvalidId, UsageError
from headrace.ids import NONCE_ALPHABET, RequestId, check_run_name, digest_ids, encode_ids, is_ours

runs = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=24)
nonces = st.text(NONCE_ALPHABET, min_size=8, max_size=8)
token_ids = st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=40)
requests = st.builds(RequestId.make, runs, st.integers(0, 10**12 - 1), nonces, token_ids)


@given(request=requests)
def test_an_id_round_trips(request: RequestId) -> None:
    assert RequestId.parse(str(request)) == request
    assert is_ours(str(request))


@given(one=requests, other=requests)
def test_no_id_is_the_prefix_of_another(one: RequestId, other: RequestId) -> None:
    assume(one != other)
    assert not str(one).startswith(str(other))


@given(request=requests, tail=st.text("-abcdef0123456789", min_size=1, max_size=5))
def test_an_id_with_a_tail_is_none_of_ours(request: RequestId, tail: str) -> None:
    assert not is_ours(str(request) + tail)
    assert not is_ours(str(request)[:-1])


@given(ids=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40))
def test_the_digest_is_blake2b_of_little_endian_int64(ids: list[int]) -> None:
    encoded = struct.pack(f"<{len(ids)}q", *ids)
    assert encode_ids(ids) == encoded
    assert digest_ids(encoded) == hashlib.blake2b(encoded, digest_size=8).hexdigest()


@given(ids=token_ids, other=token_ids)
def test_only_the_ids_that_made_it_prove_a_request(ids: list[int], other: list[int]) -> None:
    request = RequestId.make("r", 0, "aaaaaaaa", ids)
    assert request.proves(encode_ids(ids))
    assert request.proves(encode_ids(other)) == (ids == other)
    assert not request.proves(encode_ids(ids)[:-1])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "req_17",
        "hr-r-0-aaaaaaaa-5-0123456789abcdef\n",
        " hr-r-0-aaaaaaaa-5-0123456789abcdef",
        "hr-R-0-aaaaaaaa-5-0123456789abcdef",
        "hr--0-aaaaaaaa-5-0123456789abcdef",
        "hr-r-00-aaaaaaaa-5-0123456789abcdef",
        "hr-r--1-aaaaaaaa-5-0123456789abcdef",
        "hr-r-1000000000000-aaaaaaaa-5-0123456789abcdef",
        "hr-r-0-aaaaaaa-5-0123456789abcdef",
        "hr-r-0-aaaaaaaa-0-0123456789abcdef",
        "hr-r-0-aaaaaaaa-05-0123456789abcdef",
        "hr-r-0-aaaaaaaa-٥-0123456789abcdef",
        "hr-r-0-aaaaaaaa-5-0123456789ABCDEF",
        "hr-r-0-aaaaaaaa-5-0123456789abcde",
        "hr-r-0-aaaaaaaa-5-0123456789abcdef0",
        "hr-r-0-../../aa-5-0123456789abcdef",
        "x" * 10_000_000,
    ],
)
def test_what_is_no_id_is_refused_with_a_short_message(text: str) -> None:
    assert not is_ours(text)
    with pytest.raises(InvalidId) as error:
        RequestId.parse(text)
    assert len(str(error.value)) < 200


@given(text=st.text(max_size=80))
@example("hr-r-0-aaaaaaaa-5-0123456789abcdef")
def test_any_text_is_an_id_that_round_trips_or_is_refused(text: str) -> None:
    try:
        assert str(RequestId.parse(text)) == text
    except InvalidId:
        assert not is_ours(text)


def test_an_attempt_needs_tokens_and_a_whole_nonce() -> None:
    with pytest.raises(InvalidId):
        RequestId.make("r", 0, "aaaaaaaa", [])
    with pytest.raises(InvalidId):
        RequestId.make("r", 0, "short", [1])
    with pytest.raises(OverflowError):
        RequestId.make("r", 0, "aaaaaaaa", [1 << 63])


def test_the_canary_is_known_and_its_name_is_reserved() -> None:
    assert RequestId.make("canary", 0, "aaaaaaaa", [1]).is_canary
    assert not RequestId.make("canary2", 0, "aaaaaaaa", [1]).is_canary
    with pytest.raises(UsageError, match="reserved"):
        check_run_name("canary")


@pytest.mark.parametrize("name", ["", "A", "a-b", "a_b", "a" * 25, "a\n", "ä", "../x"])
def test_a_name_that_no_run_may_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="1 to 24"):
        check_run_name(name)
    assert check_run_name("run1") == "run1"
