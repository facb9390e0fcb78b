"""Prepared sizes: which one a forward is given, and which there may be."""

from __future__ import annotations

import pytest

from autotune.errors import UserError
from autotune.execution import check_capture_sizes, round_up
from autotune.trees.tree import MAX_STEP


def test_a_size_goes_to_the_smallest_bucket_that_holds_it() -> None:
    capture_sizes = (1, 8, 16, 64)
    assert [round_up(size, capture_sizes) for size in (1, 2, 7, 8, 9, 16, 17, 63, 64)] == [
        1,
        8,
        8,
        8,
        16,
        16,
        64,
        64,
        64,
    ]


def test_a_size_beyond_the_largest_bucket_is_sent_as_it_is() -> None:
    assert [round_up(size, (8, 16)) for size in (16, 17, 160)] == [16, 17, 160]


def test_without_buckets_every_size_is_sent_as_it_is() -> None:
    assert [round_up(size, ()) for size in range(1, MAX_STEP + 1)] == list(range(1, MAX_STEP + 1))


def test_every_size_against_a_search_through_all_buckets() -> None:
    for capture_sizes in ((1,), (3, 4, 5), (1, 2, 4, 8, 16, 32, 64, 128), (160,)):
        for size in range(1, MAX_STEP + 1):
            enough = [bucket for bucket in capture_sizes if bucket >= size]
            assert round_up(size, capture_sizes) == min(enough, default=size)


def test_buckets_are_put_in_order_once_each() -> None:
    assert check_capture_sizes([16, 1, 8, 16]) == (1, 8, 16)
    assert check_capture_sizes([]) == ()
    assert check_capture_sizes([1, MAX_STEP]) == (1, MAX_STEP)


@pytest.mark.parametrize("size", [0, -4, MAX_STEP + 1])
def test_a_bucket_that_no_forward_can_use_is_refused(size: int) -> None:
    message = f"buckets are numbers of tokens from 1 to {MAX_STEP}; got {size}; mend that size"
    with pytest.raises(UserError) as caught:
        check_capture_sizes([8, size])
    assert str(caught.value) == message
