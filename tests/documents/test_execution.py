"""Capture sizes: which one an input is padded to, and which ones are valid."""

from __future__ import annotations

import pytest

from autotune.documents.execution import DEFAULT_CAPTURE_SIZES, capture_sizes_for, check_capture_sizes, round_up
from autotune.errors import UserError
from autotune.trees.limits import MAX_STEP


def test_round_up_against_a_search_through_all_capture_sizes() -> None:
    """The smallest capture size that is large enough; sizes above the largest, or without capture sizes, are
    unchanged.
    """
    for capture_sizes in ((), (1,), (3, 4, 5), (8, 16), (1, 2, 4, 8, 16, 32, 64, 128), (160,)):
        for size in range(1, MAX_STEP + 1):
            large_enough = [capture_size for capture_size in capture_sizes if capture_size >= size]
            assert round_up(size, capture_sizes) == min(large_enough, default=size)


def test_capture_sizes_are_sorted_without_duplicates() -> None:
    for given, expected in (([16, 1, 8, 16], (1, 8, 16)), ([], ()), ([1, MAX_STEP], (1, MAX_STEP))):
        assert check_capture_sizes(given) == expected


def test_default_capture_sizes_depend_on_the_mode() -> None:
    assert capture_sizes_for("eager", ()) == ()
    assert capture_sizes_for("cuda-graph", ()) == DEFAULT_CAPTURE_SIZES
    assert capture_sizes_for("eager", (8, 4)) == (4, 8)
    assert capture_sizes_for("cuda-graph", (8, 4)) == (4, 8, 16, 32, 48, 64, 96, 128, 160), (
        "larger steps are padded too"
    )
    assert capture_sizes_for("cuda-graph", (160,)) == (160,)


def test_capture_size_out_of_range_is_refused() -> None:
    for size in (0, -4, MAX_STEP + 1):
        with pytest.raises(UserError) as caught:
            check_capture_sizes([8, size])
        assert (
            str(caught.value) == f"capture sizes are numbers of tokens from 1 to {MAX_STEP}; got {size}; fix that size"
        )
