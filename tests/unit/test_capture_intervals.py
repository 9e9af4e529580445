from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_capture.intervals import Coverage

ROWS = 40
RANGES = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(lambda r: (r[0], r[0] + r[1])))


@given(RANGES)
def test_the_coverage_is_the_set_of_rows_that_were_added(ranges: list[tuple[int, int]]) -> None:
    coverage, rows = Coverage(), set()
    for begin, end in ranges:
        added = set(range(begin, end))
        assert coverage.add(begin, end) == len(added & rows)
        rows |= added
        assert coverage.covers(ROWS) == (set(range(ROWS)) <= rows)
        assert coverage.missing(ROWS) == len(set(range(ROWS)) - rows)
        assert {row for b, e in coverage.intervals() for row in range(b, e)} == rows


@given(RANGES)
def test_the_intervals_stay_sorted_and_apart(ranges: list[tuple[int, int]]) -> None:
    coverage = Coverage()
    for begin, end in ranges:
        coverage.add(begin, end)
    flat = [edge for interval in coverage.intervals() for edge in interval]
    assert all(low < high for low, high in pairwise(flat))


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 3), (4, 2)])
def test_what_is_no_range_of_rows_is_refused(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="no range"):
        Coverage().add(begin, end)
