"""The one exception for mistakes that the user can mend; the command line catches it in one place and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend, said in one line: the rule, the value that broke it, and what to do next."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` when a known word is close, else the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
