"""Predicted speed of chains where no trace exists: acceptance of a ``speculation_profile.json``, prices of a cost table."""

from __future__ import annotations

from autotune.acceptance.speculation_profile import SpeculationProfile, as_trace
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.documents.subnet import Subnet
from autotune.search.evaluator import Candidate, Evaluator

MAX_ANSWER_TOKENS = 256
NUM_POSITIONS = 16_384  # of the answers that are drawn


def predict_chains(profile: SpeculationProfile, table: CostTable) -> list[Candidate]:
    """Every chain that the profile describes and the table prices, with the first draft of the table, by length."""
    costs = table.drafts[0]
    longest_kv = max(point.kv_length for point in table.verify.points)  # nothing is extrapolated
    answer_tokens = min(MAX_ANSWER_TOKENS, longest_kv // 2)
    trace = as_trace(
        profile,
        costs.draft,
        table.target,
        subnet=Subnet(heads=costs.heads, vocabulary=costs.vocabulary),
        prompt_tokens=longest_kv - answer_tokens,
        answer_tokens=answer_tokens,
        num_prompts=NUM_POSITIONS // answer_tokens,
    )
    evaluator = Evaluator([trace], table, jobs=1)
    longest = min(profile.num_speculative_tokens, table.verify.max_tokens - 1)
    chains = ({"policy": "chain", "depth": depth} for depth in range(1, longest + 1))
    return [
        evaluator.evaluate(Configuration(tree=chain, draft=costs.draft.id, subnet=trace.header.subnet))
        for chain in chains
    ]


def print_predictions(candidates: list[Candidate], console: Console) -> None:
    """Print a row for each length; the fastest is emphasised."""
    rows = [
        [str(number), f"{one.tokens_per_round:.2f}", f"{one.speedup:.2f}x", f"{one.ms_per_token:.2f}"]
        for number, one in enumerate(candidates, start=1)
    ]
    fastest = max(range(len(candidates)), key=lambda number: candidates[number].speedup)
    console.table(
        "Predicted chains, at the acceptance of the speculation profile",
        ["draft tokens", "M", "speedup", "ms a token"],
        rows,
        emphasised=fastest,
    )
