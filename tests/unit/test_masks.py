from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.masks import decode_mask, encode_mask, mask_length, trained_tokens

masks = st.lists(st.integers(0, 1), max_size=200)


@given(mask=masks)
def test_a_mask_round_trips(mask: list[int]) -> None:
    lengths = encode_mask(mask)
    assert list(decode_mask(lengths)) == mask
    assert mask_length(lengths) == len(mask)
    assert trained_tokens(lengths) == sum(mask)


@given(mask=masks)
def test_lengths_alternate_and_only_the_first_may_be_zero(mask: list[int]) -> None:
    lengths = encode_mask(mask)
    assert all(length > 0 for length in lengths[1:])
    assert not mask or (lengths[0] == 0) == (mask[0] == 1)


def test_the_form_that_the_documentation_shows() -> None:
    assert encode_mask([1, 1, 0]) == (0, 2, 1)
    assert encode_mask([0, 0, 1]) == (2, 1)
    assert encode_mask([]) == ()
    assert encode_mask(iter([True, False])) == (0, 1, 1)


@pytest.mark.parametrize("value", [2, -1, 0.5, "1", None])
def test_a_mask_of_other_values_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="0 and 1"):
        encode_mask([0, value, 1])  # type: ignore[list-item]
