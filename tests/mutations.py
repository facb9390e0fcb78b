"""Damaged copies of what a user can give: of content, of text and of bytes, drawn by Hypothesis.

A few examples of every kind in each run; nightly, with all modules that use ``mutate``, more than 20,000.
"""

from __future__ import annotations

import copy
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import UserError

MANY = 270  # of each kind, nightly
MOST_BYTES, MOST_MS = 1 << 30, 600_000  # of one mutation; the time tells a search without end from a slow machine
nightly = pytest.mark.parametrize("is_nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])


def mutate(few: int, strategy: Any, check: Callable[[Any], Any], is_nightly: bool) -> None:
    """Check mutations: none may raise anything but a ``UserError`` of one line, take ten minutes, or take another GiB
    of memory.
    """

    @settings(
        max_examples=MANY if is_nightly else few,
        deadline=MOST_MS,
        database=None,
        derandomize=not is_nightly,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(mutation: Any) -> None:
        with _bounded_memory():
            try:
                check(mutation)
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 2000, error

    run()


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Inside the context this process can take another GiB of address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
ODD_VALUES = (
    *(
        None,
        True,
        0,
        -1,
        2,
        2**31,
        2**63,
        10**30,
        0.5,
        -0.5,
        1e308,
        "",
        "x",
        "1",
        "\0",
        "\ud800",
        "²",
        "é" * 300,
        "a" * 5000,
    ),
    *(
        "<script>",
        "[/x]",
        "../../x",
        "/etc/passwd",
        "2020-99-99",
        "autotune.study/9",
        [],
        {},
        [[]],
        {"a": 1},
        [None, "x"],
        DEEP,
    ),
)
SNIPPETS = (
    *(
        "[" * 2000,
        "{" * 300,
        "NaN",
        "-Infinity",
        "1e999",
        "9" * 5000,
        '"\\ud800"',
        "\0",
        "\ufeff",
        "\u2028",
        '"a":1,"a":2,',
        ",",
        '"',
    ),
    *(
        "&a ",
        "*a",
        "<<: ",
        "!!set ",
        "!!int abc",
        "!!python/name:os.system ",
        "\t",
        "\n",
        "- ",
        ": ",
        "? ",
        "%",
        "|\n",
        "# ",
        "---\n",
    ),
)


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every container in a content with each of its keys."""
    places, level = [], [content]
    while level:
        keyed = [(value, key) for value in level for key in (value if isinstance(value, dict) else range(len(value)))]
        places += keyed
        level = [inner for value, key in keyed if isinstance(inner := value[key], dict | list)]
    return places


@st.composite
def mutated(draw: Any, content: Any) -> Any:
    """A content in which up to three values are replaced, left out, repeated or given to another key."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        if not (places := _places(content)):
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        other, other_key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(["replace", "replace", "omit", "exchange", "add", "scale"])):
            case "replace":
                container[key] = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
            case "omit":
                del container[key]
            case "exchange":
                container[key] = copy.deepcopy(other[other_key])
            case "add" if isinstance(container, dict):
                container[draw(st.sampled_from(["x", "schema", "policy", "\0", str(other_key)]))] = container[key]
            case "add":
                container.insert(key, container[key])
            case _ if isinstance(container[key], int | float):
                container[key] *= draw(st.sampled_from([-1, 0, 1000, 10**9]))
            case _:
                container[key] = [container[key]]
    return content


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """Bytes that are cut, changed, repeated, or have something else in between."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from([1, 4, 30, len(data)]))
        middle = draw(
            st.one_of(
                st.sampled_from(
                    [
                        b"",
                        data[at : at + size] * 2,
                        b"\xff" * size,
                        bytes(size),
                        *(s.encode("utf-8", "surrogatepass") for s in SNIPPETS),
                    ]
                ),
                st.binary(max_size=8),
            )
        )
        data = data[:at] + middle + data[at + draw(st.sampled_from([0, size])) :]
    return data


@st.composite
def json_bytes(draw: Any, content: Any) -> bytes:
    """A JSON text of a mutated content, which may be damaged too; of a list of rows, JSON Lines where it is a tuple."""
    if isinstance(content, tuple):
        rows = [draw(mutated(row)) if draw(st.booleans()) else row for row in content]
        text = "\n".join(json.dumps(row) for row in rows).encode()
    else:
        text = json.dumps(draw(mutated(content))).encode()
    return draw(damaged(text)) if draw(st.integers(0, 3)) == 0 else text
