"""Tracebacks of small made-up programs, and explanations that name the failing line, the cause and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numpy.random import Generator


@dataclass(frozen=True)
class Failure:
    """A failing expression with its message, cause and remedy."""

    line: str
    error: str
    message: str
    cause: str
    remedy: str


def _key_error(a: str, b: str, c: str, number: int) -> Failure:
    line = f"return {a}[{b!r}]"
    return Failure(
        line, "KeyError", repr(b), f"the mapping `{a}` has no key {b!r}", f"use `{a}.get({b!r})` or add the key"
    )


def _index_error(a: str, b: str, c: str, number: int) -> Failure:
    cause = f"the list `{a}` has no item with index {number}"
    return Failure(f"{b} = {a}[{number}]", "IndexError", "list index out of range", cause, f"check `len({a})` first")


def _attribute_error(a: str, b: str, c: str, number: int) -> Failure:
    message = f"'NoneType' object has no attribute '{b}'"
    return Failure(
        f"return {a}.{b}()",
        "AttributeError",
        message,
        f"`{a}` is None",
        f"check that `{a}` is set before `{b}` is called",
    )


def _name_error(a: str, b: str, c: str, number: int) -> Failure:
    cause = f"`{b}` is used before anything is assigned to it"
    return Failure(
        f"{a} = {b} + {number}",
        "NameError",
        f"name '{b}' is not defined",
        cause,
        f"assign a value to `{b}` or import it",
    )


def _type_error(a: str, b: str, c: str, number: int) -> Failure:
    message = f"{b}() got an unexpected keyword argument '{c}'"
    cause = f"`{b}` has no parameter `{c}`"
    return Failure(
        f"{a} = {b}({c}={number})",
        "TypeError",
        message,
        cause,
        f"add the parameter `{c}` to `{b}` or leave it out of the call",
    )


def _zero_division(a: str, b: str, c: str, number: int) -> Failure:
    return Failure(
        f"{a} = {b} / {c}", "ZeroDivisionError", "division by zero", f"`{c}` is zero", f"check that `{c}` is not zero"
    )


def _value_error(a: str, b: str, c: str, number: int) -> Failure:
    message = f"invalid literal for int() with base 10: '{c}'"
    return Failure(
        f"{a} = int({b})",
        "ValueError",
        message,
        f"`{b}` holds '{c}', which is not a number",
        f"check `{b}` before it is converted",
    )


def _file_error(a: str, b: str, c: str, number: int) -> Failure:
    message = f"[Errno 2] No such file or directory: '{c}.txt'"
    line = f"with open({b}) as {a}:"
    return Failure(
        line,
        "FileNotFoundError",
        message,
        f"`{b}` names the file {c}.txt, which does not exist",
        "create the file or correct the path",
    )


FAILURES: tuple[Callable[[str, str, str, int], Failure], ...] = (
    *(_key_error, _index_error, _attribute_error, _name_error, _type_error, _zero_division, _value_error, _file_error),
)


def explain_traceback(names: Sequence[str], rng: Generator) -> tuple[str, str]:
    """A request to explain a traceback of two or three calls, and the explanation."""
    number_of_calls = int(rng.integers(1, 3))
    words = [str(name) for name in rng.choice(list(names), 5 + 2 * number_of_calls, replace=False)]
    a, b, c, main, argument = words[:5]
    failure = FAILURES[int(rng.integers(len(FAILURES)))](a, b, c, int(rng.integers(2, 100)))
    frames = [(main, int(rng.integers(1, 400)), "<module>", f"{words[5]}({argument})")]
    for call in range(number_of_calls):
        function, file = words[5 + 2 * call : 7 + 2 * call]
        is_last = call == number_of_calls - 1
        text = failure.line if is_last else f"{words[7 + 2 * call]}({argument})"
        frames.append((file, int(rng.integers(1, 400)), function, text))
    lines = [f'  File "{file}.py", line {line}, in {function}\n    {text}' for file, line, function, text in frames]
    traceback = "\n".join(["Traceback (most recent call last):", *lines, f"{failure.error}: {failure.message}"])
    calls = ", then ".join(f"line {line} of {file}.py calls `{text}`" for file, line, _, text in frames[:-1])
    file, number, function, text = frames[-1]
    answer = (
        f"The function `{function}` fails in line {number} of {file}.py, at `{text}`. It raises {failure.error} because {failure.cause}. "
        f"Before it, {calls}. To repair it, {failure.remedy}."
    )
    return f"Explain the traceback.\n\n{traceback}", answer
