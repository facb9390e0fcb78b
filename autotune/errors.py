"""What the user can mend; the command line catches it in one place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend, said in one line: the rule, the value that broke it, and what to do next."""

    exit_code = 2


class NotComparable(UserError):
    """Two things that were to be compared speak of another model, workload or device."""

    exit_code = 4


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` when a known word is close, else the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
