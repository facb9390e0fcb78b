"""Answers on which speedups say little: a loop of few tokens, which any draft predicts, no answer, or its first tokens.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.trees.limits import Ints

LONGEST_LOOP = 8  # tokens
LEAST_TOKENS = 16  # of an answer in which a loop is looked for
# Of the tokens of an answer that are one token, or those of a loop before. Answers of the bundled targets have at most
# 0.3.
LOOP_SHARE = 0.6
WORTH_SAYING = 0.1  # share of the answers
SHORT_LIMIT = 32  # tokens: an answer that is cut there is only begun


def is_loop(answer: Sequence[int] | Ints) -> bool:
    """Whether most of an answer is one token, or repeats what is up to ``LONGEST_LOOP`` tokens before."""
    tokens = np.asarray(answer, np.int64)
    if len(tokens) < LEAST_TOKENS:
        return False
    num_repeated = [np.count_nonzero(tokens[n:] == tokens[:-n]) for n in range(1, LONGEST_LOOP + 1)]
    return bool(max(*num_repeated, np.unique_counts(tokens).counts.max()) >= LOOP_SHARE * len(tokens))


def degenerate_answers(answers: Sequence[Sequence[int] | Ints], limits: Sequence[int]) -> str | None:
    """One line with the numbers of answers that are degenerate, and what to do; None where they are few.

    Args:
        answers: the tokens of each.
        limits: the most tokens that each could have.
    """
    lengths, limit = np.array([*map(len, answers)]), np.array(limits)
    parts = []
    for what, is_so in (
        ("repeat one token or a short loop", np.array([*map(is_loop, answers)])),
        ("are empty", (lengths <= 1) & (limit > 1)),
    ):
        if is_so.any() and is_so.mean() >= WORTH_SAYING:
            parts.append(f"{is_so.sum()} of {len(answers)} answers {what}")
    if not parts and len(answers) and ((lengths >= limit) & (limit > 1) & (limit <= SHORT_LIMIT)).all():
        return f"all {len(answers)} answers are cut after {limit.max()} tokens or fewer; speedups on longer ones may be others: give a larger --budget or --max-new-tokens"
    if not parts:
        return None
    return (
        f"{', and '.join(parts)}; drafts look faster on such answers than on others: check the prompts, the chat template "
        "and --dtype"
    )
