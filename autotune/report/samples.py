"""Samples for the report: the tree that each operating point grows on a recorded prompt, and the answer round by round."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.acceptance.rounds import Round, rounds
from autotune.acceptance.trace import Trace
from autotune.documents.decoding_profile import DecodingProfile
from autotune.report.chosen import when_of
from autotune.report.prompts import TokenTexts
from autotune.report.sample_tree import Stretch, draw_tree, round_to_draw, stretches
from autotune.report.sources import Sources
from autotune.trees.tree import ROOT
from autotune.workloads.workload import WorkloadPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 448  # of an image's longer side
MOST_IMAGES = 4


@dataclass(frozen=True)
class Sample:
    """One prompt under one point."""

    number: int
    """Of the point."""
    when: str
    policy: str
    prompt: str
    """Name."""
    question: str | None
    """Its text; None where the workload is not at hand."""
    images: list[str]
    """As data URIs."""
    first_text: str
    """What the prefill emitted."""
    answer: list[Stretch]
    drawn: int
    """Number of the round that is drawn, from 1 on."""
    num_rounds: int
    accepted: int
    nodes: int
    missing: int
    """Nodes that the trace does not hold, of that round."""
    tokens_per_round: float
    svg: str


def samples(sources: Sources, prompts: dict[str, WorkloadPrompt], tokens: TokenTexts) -> list[Sample]:
    """One for each point of the profile whose draft was recorded: its first prompt with an image, or its first."""
    found: list[Sample] = []
    if sources.profile is None:
        return found
    for number, point in enumerate(sources.profile.points):
        trace = sources.trace_of(point)
        if trace is None:
            continue
        able = [p for p in sources.prompts_of(number) if trace.answer_start[p + 1] - trace.answer_start[p] > 1]
        if able:
            chosen = next((p for p in able if trace.num_visual_tokens[p] > 0), able[0])
            known = prompts.get(trace.header.prompts[chosen])
            found.append(_sample(sources.profile, number, trace, chosen, known, tokens))
    return found


def _sample(
    profile: DecodingProfile,
    number: int,
    trace: Trace,
    prompt: int,
    known: WorkloadPrompt | None,
    tokens: TokenTexts,
) -> Sample:
    point = profile.points[number]
    assert point.tree is not None
    taken = list(rounds(trace, prompt, point.tree, point.fallback))
    drawn = round_to_draw(taken)
    answer = trace.forest.answer[trace.answer_start[prompt] : trace.answer_start[prompt + 1]].tolist()
    texts = [tokens.text(answer[:place], token) for place, token in enumerate(answer)]
    one = taken[drawn]
    return Sample(
        number=number,
        when=when_of(profile, number),
        policy=point.tree.policy,
        prompt=trace.header.prompts[prompt],
        question=None if known is None else known.settings.text,
        images=[] if known is None else [data_uri(image) for image in known.pixels[:MOST_IMAGES]],
        first_text=texts[0],
        answer=stretches(taken, texts, drawn),
        drawn=drawn + 1,
        num_rounds=len(taken),
        accepted=len(one.path),
        nodes=one.num_nodes,
        missing=one.num_missing,
        tokens_per_round=(len(answer) - 1) / len(taken),
        svg="" if one.tree is None else _svg(one, answer, texts, tokens),
    )


def _svg(one: Round, answer: list[int], texts: list[str], tokens: TokenTexts) -> str:
    """The tree of a round, with the text of every node behind its own ancestors."""
    tree = one.tree
    assert tree is not None
    so_far = answer[: one.position + 1]
    behind: list[list[int]] = [so_far]
    node_texts = [texts[one.position]]
    for node in range(ROOT + 1, int(tree.size[0])):
        above = behind[tree.parent[node]]
        node_texts.append(tokens.text(above, int(tree.token[node])))
        behind.append([*above, int(tree.token[node])])
    end = one.position + len(one.path) + 1
    label = (
        f"Tree of {one.num_nodes} drafted tokens; accepted: "
        f"{', '.join(repr(node_texts[node]) for node in one.path) or 'none'}"
    )
    return draw_tree(tree, one.path.tolist(), node_texts, texts[end] if end < len(texts) else None, label)


def data_uri(image: Image) -> str:
    """A PNG inside its address, at most ``MOST_PIXELS`` long; small ones are left as they are."""
    small = image.copy()
    small.thumbnail((MOST_PIXELS, MOST_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
