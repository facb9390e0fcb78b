"""Counts what coupling of retrieved tokens would gain: tokens per round (M) with and without it, alone and as a second source.

Without coupling, retrieval proposes the most frequent follower of the longest match. With it, followers are ranked by the
logarithm of their share of the occurrences plus the noise of their position, as a draft's tokens are by ``TokenSampler``. Both
are recorded along the same sampled answers and replayed. The counts do not depend on the machine.
Takes about 5 minutes.

    python benchmarks/coupled_retrieval.py [--target smollm2 --draft smollm2/mtp --workload smollm2] [--prompts 32]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.calibration import calibrate
from autotune.acceptance.replay import replay
from autotune.acceptance.trace import Forest, Trace, bounds_for, join
from autotune.console import Console
from autotune.cost.request_costs import PrefillCost
from autotune.cost.table import DensePrices
from autotune.drafters.retrieval import RetrievalDraft
from autotune.modeling.loading import RETRIEVAL, reference
from autotune.recording.recorder import Recorder, record_forest
from autotune.search.model_pool import ModelPool
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.limits import MAX_RETRIEVED, Ints
from autotune.trees.policy import Policy
from autotune.trees.priced import PricedPolicy
from autotune.trees.tree import Retrieved
from autotune.workloads.workload import Workload, load_workload

FOLLOWERS = 48  # of a match that are ranked
ALONE: tuple[Policy, ...] = (ChainPolicy(depth=5), Eagle2Policy(depth=5, k=4, budget=16))
TOGETHER = PricedPolicy(worth=0.5, level_value=0.9, retrieval=True)
Noise = Callable[[int], NDArray[np.float32]]


class CoupledRetrieval(RetrievalDraft):
    """Ranks followers with the noise of their positions, which ``noise`` returns; None: by their shares alone."""

    noise: Noise | None = None

    def followers(self, token: Ints, parent: Ints, nodes: Ints, num_visible: Ints, num_proposals: int) -> Any:
        if self.noise is None:
            return super().followers(token, parent, nodes, num_visible, num_proposals)
        many = super().followers(token, parent, nodes, num_visible, max(FOLLOWERS, num_proposals))
        tokens, scores, match_length = many[0], many[1].astype(np.float64), many[2]
        for row, node in enumerate(nodes):
            position = num_visible[row]
            while parent[node] >= 0:
                node, position = parent[node], position + 1
            if scores[row, 0] > -np.inf:
                scores[row] += self.noise(int(position))[tokens[row]]
                scores[row] -= np.logaddexp.reduce(scores[row])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :num_proposals]
        best = np.take_along_axis(scores, order, 1).astype(np.float32)
        return np.take_along_axis(tokens, order, 1), best, match_length

    def continuation(self) -> Retrieved:
        if self.noise is None:
            return super().continuation()
        found, parent = np.full(MAX_RETRIEVED + 1, -1), np.arange(-1, MAX_RETRIEVED)
        match_length = 0
        for step in range(MAX_RETRIEVED):
            arguments = found, parent, np.array([step]), np.array([self.length])
            tokens, logprobs, length = self.followers(*arguments, 1)
            if logprobs[0, 0] == -np.inf:
                break
            found[step + 1] = tokens[0, 0]
            match_length = int(length[0]) if step == 0 else match_length
        return Retrieved(found[1:], match_length)


def record(recorder: Recorder, workload: Workload, *, is_coupled: bool) -> tuple[Trace, Forest, list[int]]:
    """The trace of retrieval alone, the answers with their continuations, and at how many positions several tokens had followed and
    how often the first continuation was right there, and at how many positions one had followed and likewise.
    """
    draft = CoupledRetrieval()
    draft.attach(recorder.target)
    bounds = bounds_for(ALONE)
    parts, tokens, lengths, counts = [], [], [], np.zeros((2, 2), np.int64)
    for prompt, answer in zip(workload.prompts, recorder.answers(workload), strict=True):
        sampler, inputs = recorder.sampler(prompt), prompt.inputs(recorder.processor)
        assert sampler is not None
        (text,) = draft.prompts(inputs)
        assert len(text) == answer.prompt_length, "positions are those of the target"

        def noise(position: int, sampler: Any = sampler) -> NDArray[np.float32]:
            found: NDArray[np.float32] = sampler.noise([position], draft.vocab_size)[0].numpy()
            return found

        draft.noise = noise if is_coupled else None
        part = record_forest(recorder.target, draft, inputs, answer, bounds)
        draft.prefill(text, None, capacity=0)
        num_followers = (part.forest.child_logprob[: len(answer.tokens) - 1] > -np.inf).sum(1)
        for number, token in enumerate(answer.tokens):
            draft.append(int(token))
            found = draft.continuation()
            tokens.append(found.tokens)
            lengths.append(found.match_length)
            if number + 1 < len(answer.tokens) and num_followers[number] > 0:
                counts[int(num_followers[number] > 1)] += 1, found.tokens[0] == answer.tokens[number + 1]
        parts.append(part)
    trace = join(recorder.header(draft, reference(RETRIEVAL), draft.subnet, (), workload, bounds), parts)
    continued = replace(trace.forest, retrieved=np.array(tokens), match_length=np.array(lengths, np.int64))
    return trace, continued, counts.ravel().tolist()


def free_prices() -> DensePrices:
    free = PrefillCost(intercept_ms=0.0, per_token_ms=0.0, image_ms=0.0, samples=[])
    return DensePrices(np.ones(1), *[np.ones((2, 1))] * 3, 16, 0.0, 0.0, 0.0, free)


@click.command()
@click.option("--target", default="digits/target", show_default=True)
@click.option("--draft", default="digits/star", show_default=True, help="First source of the trees of two sources.")
@click.option("--workload", default="digits", show_default=True)
@click.option("--temperature", "temperatures", multiple=True, default=(0.7, 1.0), show_default=True)
@click.option("--prompts", default=32, show_default=True)
@click.option("--tokens", default=96, show_default=True, help="Limit of the answers' length.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/coupled-retrieval"))
def main(
    target: str, draft: str, workload: str, temperatures: tuple[float, ...], prompts: int, tokens: int, folder: Path
) -> None:
    """Compare proposals of retrieval with and without coupling."""
    console, pool = Console(), ModelPool(target, [draft], "cpu")
    recorder, rows = pool.recorder(folder), []
    prompts_of = load_workload(workload, "evaluate", num_prompts=prompts).cut(prompts, tokens)
    for temperature in temperatures:
        sampled = prompts_of.sampled(temperature)
        loaded, bounds = pool.draft(draft), bounds_for([TOGETHER])
        of_draft = recorder.trace(loaded, reference(draft), sampled, visual_keep=1.0, bounds=bounds)
        for is_coupled in (False, True):
            alone, continued, (one, right, several, right_of_several) = record(recorder, sampled, is_coupled=is_coupled)
            retrieved = {"retrieved": continued.retrieved, "match_length": continued.match_length}
            if not is_coupled:
                assert (of_draft.forest.retrieved == continued.retrieved).all()
            of_both = replace(of_draft, forest=replace(of_draft.forest, **retrieved))
            tree = TOGETHER.model_copy(update={"calibration": calibrate(of_both)})
            replays = [replay(alone, policy, free_prices()) for policy in ALONE]
            together = replay(of_both, tree, free_prices())
            rows.append(
                [
                    f"{temperature:g}",
                    "coupled" if is_coupled else "by share",
                    *(f"{found.tokens_per_round:.3f}" for found in (*replays, together)),
                    f"{together.draft_forwards.sum() / together.rounds.sum():.2f}",
                    f"{right}/{one}",
                    f"{right_of_several}/{several}",
                ]
            )
    labels = [f"M, {policy.policy}" for policy in ALONE]
    columns = ["T", "retrieval", *labels, f"M, {draft} + retrieval", "levels", "one follower: right", "several: right"]
    console.table(f"{workload}, {prompts} prompts", columns, rows)


if __name__ == "__main__":
    main()
