"""``speculation_profile.json`` of NVIDIA's specdec_bench, schema 1.0: how many tokens of a chain the target accepts.

Dynamo reads its conditional rates, P(token i + 1 accepted | the first i are accepted), vLLM's synthetic acceptance the marginal ones,
P(the first i + 1 are accepted). It is written from a trace or from real runs, and read as a trace where none was recorded.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autotune.acceptance.rounds import rounds
from autotune.acceptance.trace import Forest, ForestBounds, RecordedPrompt, Trace, TraceHeader, join
from autotune.documents.provenance import ModelReference, stamp
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import describe, read_json, write_bytes
from autotune.trees.chain import ChainPolicy

SCHEMA_VERSION = "1.0"
TOLERANCE = 0.02
"""Largest difference of a mean accept length from the one that the rates imply, as in specdec_bench."""
LONGEST_PREFIX = "longest_prefix"
METHODS = {"independent": "draft_model", "eagle3": "eagle3", "mtp": "mtp", "retrieval": "ngram"}
"""specdec_bench's names of draft kinds; others keep ours."""
RIGHT, WRONG = 1, 0  # tokens of the answers of ``as_trace``, and of proposals that are not accepted

Rate = Annotated[float, Field(ge=0, le=1)]


class Counted(NamedTuple):
    """The rounds of one request."""

    task: str
    accepted_lengths: Sequence[int]
    """Draft tokens accepted in each round; no plain steps."""


class SpeculationProfile(BaseModel):
    """The keys that are read. A file may have others; ``build`` writes all of specdec_bench's."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    schema_version: str
    measured: bool
    num_speculative_tokens: int = Field(ge=1)
    verification_method: str = LONGEST_PREFIX
    conditional_accept_rates: list[Rate] | None
    marginal_accept_rates: list[Rate] | None = None
    mean_accept_length: float | None = None

    @property
    def rates(self) -> list[float]:
        """The conditional rates."""
        return self.conditional_accept_rates or []


def read(path: Path) -> SpeculationProfile:
    """Read a file of schema 1.

    Raises:
        UserError: not such a file, another schema, nothing measured, or rates that contradict each other.
    """
    content = read_json(path)
    try:
        profile = SpeculationProfile.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, SpeculationProfile)}") from None
    if profile.schema_version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise UserError(
            f"{path}: schema_version: this program reads {SCHEMA_VERSION}; got {profile.schema_version!r}; update autotune"
        )
    if not profile.measured:
        raise UserError(
            f"{path}: measured: the file is a placeholder without a measurement; measure with specdec_bench"
        )
    if profile.conditional_accept_rates is None or profile.verification_method != LONGEST_PREFIX:
        raise UserError(
            f"{path}: verification_method: rates by position exist for {LONGEST_PREFIX!r} alone; "
            f"got {profile.verification_method!r}; measure with it"
        )
    conditional, marginal = profile.rates, profile.marginal_accept_rates
    for name, rates in (("conditional_accept_rates", conditional), ("marginal_accept_rates", marginal)):
        if rates is not None and len(rates) != profile.num_speculative_tokens:
            raise UserError(
                f"{path}: {name}: one rate for each of the {profile.num_speculative_tokens} speculative tokens; "
                f"got {len(rates)}; fix the file"
            )
    implied = list(itertools.accumulate(conditional, lambda a, b: a * b))
    if marginal is not None and max(abs(a - b) for a, b in zip(implied, marginal, strict=True)) > TOLERANCE:
        raise UserError(
            f"{path}: marginal_accept_rates: the products of the conditional rates, {_rounded(implied)}; got {marginal}; fix the file"
        )
    return profile


def build(
    requests: Iterable[Counted],
    *,
    num_speculative_tokens: int,
    method: str,
    draft: str | None,
    target: str,
    conditions: dict[str, Any],
    is_chain: bool = True,
) -> dict[str, Any]:
    """The content of a file.

    Args:
        num_speculative_tokens: the longest path that a round drafts.
        draft, target: names; of a path the last two parts are written, because the file is published with checkpoints.
        conditions: how it was measured.
        is_chain: a shorter chain is a prefix of a longer one, so that the rates hold for every shorter length too.

    Raises:
        UserError: no round drafted anything.
    """
    lengths: dict[str, Counter[int]] = defaultdict(Counter)
    means = []
    for request in requests:
        emitted = [1 + length for length in request.accepted_lengths]
        lengths[request.task].update(emitted)
        means += [sum(emitted) / len(emitted)] if emitted else []
    histogram: Counter[int] = sum(lengths.values(), Counter())
    if not histogram:
        raise UserError("a speculation profile needs rounds that draft; got none; raise max_new_tokens")
    summary = _summary(histogram, num_speculative_tokens)
    marginal, mean = summary["marginal_accept_rates"], summary["mean_accept_length"]
    implied = 1 + sum(marginal)
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": method,
        "draft_checkpoint": None if draft is None else {"id": _published(draft)},
        "target_model": {"id": _published(target)},
        "num_speculative_tokens": num_speculative_tokens,
        "block_size": None,
        "max_supported_k": num_speculative_tokens,
        "verification_method": LONGEST_PREFIX,
        **summary,
        "mean_accept_length_per_request": round(sum(means) / len(means), 6),
        "accept_length_model": "chain_analytic" if is_chain else "measured_per_k",
        "accept_length_by_k": {str(num_speculative_tokens): mean},
        "acceptance_length_histogram": {str(length): histogram[length] for length in sorted(histogram)},
        "per_category": {task: _summary(counts, num_speculative_tokens) for task, counts in lengths.items() if counts},
        "measurement_conditions": {"engine": f"autotune {stamp().autotune}", **conditions},
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": mean,
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": TOLERANCE,
                "passed": abs(implied - mean) <= TOLERANCE,
            },
            "marginal_monotonicity": {"passed": True, "violations": []},  # shares of ever fewer rounds
        },
    }


def of_trace(trace: Trace, *, depth: int, method: str) -> dict[str, Any]:
    """The profile of chains of ``depth`` tokens, replayed along a trace.

    Raises:
        UserError: the trace holds shorter chains, or every answer has one token.
    """
    chain, header = ChainPolicy(depth=depth), trace.header
    requests = [
        Counted(task, [len(one.path) for one in rounds(trace, prompt, chain)])
        for prompt, task in enumerate(header.tasks)
    ]
    conditions = {"dataset": header.workload, "num_requests": trace.num_prompts, "visual_keep": header.visual_keep}
    return build(
        requests,
        num_speculative_tokens=depth,
        method=method,
        draft=header.draft.id,
        target=header.target.id,
        conditions=conditions,
    )


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a file, atomically."""
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def as_trace(
    profile: SpeculationProfile,
    draft: ModelReference,
    target: ModelReference,
    *,
    subnet: Subnet | None = None,
    prompt_tokens: int = 256,
    answer_tokens: int = 256,
    num_prompts: int = 32,
    seed: int = 0,
) -> Trace:
    """A trace of chains that are accepted at the profile's rates, for replay where no trace exists.

    At every position the accepted length is drawn anew from the rates. Chains of up to the profile's length can be replayed; the
    probabilities of their nodes are the rates, and no other proposals are known. The mean accepted length of a replay differs from
    the profile's by the sampling error of about ``num_prompts * answer_tokens`` positions.
    """
    rates, rng = np.array(profile.rates), np.random.default_rng(seed)
    depth, num_roots = len(rates), answer_tokens - 1
    marginal = np.cumprod(rates)
    logprobs = np.log(np.maximum(rates, 1e-6)).astype(np.float32)
    # The node of depth d under root i: the roots first, as in every forest, then the others root by root.
    deeper = num_roots + np.arange(num_roots * (depth - 1)).reshape(num_roots, depth - 1)
    node = np.concatenate([np.arange(num_roots)[:, None], deeper], 1)
    following = np.concatenate([node[:, 1:], np.full((num_roots, 1), -1)], 1)
    order = np.argsort(node, axis=None)
    parts = []
    for _ in range(num_prompts):
        accepted = (rng.random(num_roots)[:, None] < marginal).sum(1)
        tokens = np.where(np.arange(depth) < accepted[:, None], RIGHT, WRONG)
        forest = Forest(
            np.full(answer_tokens, RIGHT),
            tokens.flatten()[order][:, None],
            np.tile(logprobs, num_roots)[order][:, None],
            following.flatten()[order][:, None],
        )
        parts.append(RecordedPrompt(forest, prompt_tokens, prompt_tokens, 0))
    header = TraceHeader(
        provenance=stamp(),
        target=target,
        draft=draft,
        draft_kind="",
        subnet=subnet or Subnet(),
        workload="speculation profile",
        workload_sha256="",
        bounds=ForestBounds(depth=depth, num_proposals=1),
        prompts=[str(number) for number in range(num_prompts)],
        tasks=["speculation profile"] * num_prompts,
    )
    return join(header, parts)


def _summary(histogram: Counter[int], num_speculative_tokens: int) -> dict[str, Any]:
    """Rates and mean of rounds by the tokens that they emit, which count the target's own."""
    num_rounds = histogram.total()
    reached = [
        sum(count for length, count in histogram.items() if length > i) for i in range(num_speculative_tokens + 1)
    ]
    conditional = [b / a if a else 0.0 for a, b in itertools.pairwise(reached)]
    return {
        "conditional_accept_rates": _rounded(conditional),
        "marginal_accept_rates": _rounded([count / num_rounds for count in reached[1:]]),
        "mean_accept_length": round(math.fsum(n * count for n, count in histogram.items()) / num_rounds, 6),
    }


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 6) for value in values]


def _published(name: str) -> str:
    return "/".join(part for part in name.replace("\\", "/").split("/")[-2:] if part)
