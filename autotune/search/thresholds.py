"""The numbers that decide something in a search. ``docs/search.md`` has a table of them, which a test compares with this module."""

from __future__ import annotations

STAGES = {
    "cost table": 0.16,
    "screening": 0.14,
    "traces": 0.2,
    "tree search": 0.06,
    "finalists": 0.2,
    "operating points": 0.06,
    "evaluation": 0.18,
}
"""Share of the budget of each stage."""
MAX_SCREENING_SHARE = 0.6
"""Largest share of the budget for screening, in spaces with thousands of subnets."""
ANSWERS_SHARE = 0.5
"""Share of the time for traces in which the target's answers are decoded."""
MIN_TUNE_PROMPTS = 16
"""Answers are shortened until so many tuning prompts fit into the budget."""
LEAST_TOKENS = 16
"""Answers are not shortened below so many tokens."""
LEAST_PROMPTS = 6
"""A search without time for so many prompts, for tuning and for the evaluation, is refused."""
MIN_TRACED_PROMPTS = 6
"""Prompts that are recorded even past the deadline."""
MIN_TREE_SEARCH_S = 5.0
"""Seconds of tree search, even past the deadline."""
MAX_PRICED = 8
"""Of a draft with more choices of heads, only those with one share in all blocks are measured for the cost table."""
LEAST_SHARE = 0.75
"""Share of the fastest chain's speedup below which a draft does not survive screening: its trees would have to gain a third more."""
CONFIRMING = 3
"""One in so many tuning prompts of each task confirms; the others choose."""
MIN_SPLIT = 12
"""With fewer tuning prompts, all of them both choose and confirm."""
NUM_CONFIRMED = 64
"""Configurations, the fastest on the choosing prompts, that are ranked again on the confirming ones."""
NUM_CONFIRMED_OF_KIND = 8
"""The same, of each draft and policy."""
MAX_SIMILAR = 2
"""Finalists with the same draft and policy."""
CONFIDENCE = 0.9
"""A configuration is no finalist if its time is above the fastest one's in the interval of their ratio with this confidence."""
DECODING_ERROR = 0.08
"""Relative standard deviation of a measured speedup around its prediction by exact costs: in decoding, caches and clocks differ."""
ROUNDS: tuple[tuple[int, int, int | None], ...] = (
    (8, 6, None),
    (8, 4, None),
    (4, 4, None),
    (4, 2, None),
    (4, 2, 2),
    (4, 1, 1),
)
"""Prompts between two looks, finalists and published defaults (None: all) of the race: the first that fits into the time."""
RISK = 0.05
"""Probability that a race of equally fast arms drops any of them, spent over its looks."""
MIN_PROMPTS = 4
"""Prompts of a race that run even past its deadline, and between two looks at an operating point."""
MAX_PASSES = 4
"""Passes over the confirming prompts in the race of finalists."""
MAX_TIE = 1.005
"""Ratio of two estimated speedups up to which the smaller tree wins."""
NUM_POINT_CANDIDATES = 200
"""Configurations, the fastest over all prompts, from which operating points are chosen, beside the fastest of each task."""
MAX_HELD_OUT_DEFAULTS = 3
"""Published defaults, the fastest on tuning prompts, that run on held-out prompts."""
HELD_OUT_PROMPTS = 8
"""Held-out prompts between two looks."""
