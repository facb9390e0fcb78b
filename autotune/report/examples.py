"""Examples for the report: for each operating point a recorded prompt, its answer by rounds, and the tree of
one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.replay.reference_replay import ReplayedRound
from autotune.report.points import condition_label
from autotune.report.prompts import TokenTexts
from autotune.report.sources import Sources
from autotune.report.tree_drawing import draw_tree
from autotune.trees.tree import ROOT
from autotune.workloads.pixels import png_url
from autotune.workloads.prompt import WorkloadPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 448  # of an image's longer side
MAX_IMAGES = 4


@dataclass(frozen=True)
class AnswerPart:
    accepted: str
    own: str
    """The target's own token; empty if the answer ended before it."""
    is_drawn: bool


def answer_parts(replayed: Sequence[ReplayedRound], texts: Sequence[str], drawn: int) -> list[AnswerPart]:
    """The answer by rounds. ``texts`` are the texts of its tokens, the first of which the prefill emitted."""
    parts = []
    for number, emitted in enumerate(replayed):
        begin, end = emitted.position + 1, emitted.position + 1 + len(emitted.path)
        parts.append(AnswerPart("".join(texts[begin:end]), "".join(texts[end : end + 1]), number == drawn))
    return parts


def round_to_draw(replayed: Sequence[ReplayedRound]) -> int:
    """The round in which the tree helped most compared with a chain: most accepted tokens of rank 2 and above, then
    most accepted tokens, then most nodes, then the earliest.
    """

    def merit(number: int) -> tuple[int, int, int, int]:
        candidate = replayed[number]
        if candidate.tree is None:
            return -1, 0, 0, 0
        num_branched = int((candidate.tree.rank[candidate.path] > 0).sum())
        return num_branched, len(candidate.path), candidate.num_nodes, -number

    return max(range(len(replayed)), key=merit)


class DecodedExample:
    def __init__(
        self, sources: Sources, number: int, prompt: int, prompts: dict[str, WorkloadPrompt], tokens: TokenTexts
    ) -> None:
        """``number`` is the point's, ``prompt`` the prompt's in the trace; ``prompts`` are the workload's, if they were
        found.
        """
        point = sources.points[number]
        trace = sources.trace_of(point)
        assert point.tree is not None and trace is not None
        decoded = sources.rounds_of(number, prompt)
        drawn = round_to_draw(decoded)
        answer = trace.forest.answer[trace.answer_start[prompt] : trace.answer_start[prompt + 1]].tolist()
        texts = [tokens.text(answer[:position], token) for position, token in enumerate(answer)]
        self.number, self.policy = number, point.tree.policy
        self.condition = condition_label(sources.points, number)
        self.prompt = trace.header.prompts[prompt]
        found = prompts.get(self.prompt)
        self.question = None if found is None else found.settings.text
        self.images = [] if found is None else [data_uri(image) for image in found.pictures[:MAX_IMAGES]]
        self.first_text = texts[0]  # emitted by the prefill
        self.answer = answer_parts(decoded, texts, drawn)
        self.num_rounds = len(decoded)
        self.tokens_per_round = (len(answer) - 1) / len(decoded)
        self.drawn, self.shown = drawn + 1, decoded[drawn]
        self.svg = "" if self.shown.tree is None else _svg(self.shown, answer, texts, tokens)


def _svg(shown: ReplayedRound, answer: list[int], texts: list[str], tokens: TokenTexts) -> str:
    """The tree of a round; the text of a node depends on its ancestors."""
    tree = shown.tree
    assert tree is not None
    prefixes = [answer[: shown.position + 1]]  # of each node, with its own token
    node_texts = [texts[shown.position]]
    for node in range(ROOT + 1, int(tree.size[0])):
        prefix, token = prefixes[tree.parent[node]], int(tree.token[node])
        node_texts.append(tokens.text(prefix, token))
        prefixes.append([*prefix, token])
    end = shown.position + len(shown.path) + 1
    accepted = ", ".join(repr(node_texts[node]) for node in shown.path) or "none"
    label = f"Tree of {shown.num_nodes} drafted tokens; accepted: {accepted}"
    return draw_tree(tree, shown.path.tolist(), node_texts, texts[end] if end < len(texts) else None, label)


def examples(sources: Sources, prompts: dict[str, WorkloadPrompt], tokens: TokenTexts) -> list[DecodedExample]:
    """An example for each point whose draft was recorded: its first prompt with an image, or its first prompt."""
    results: list[DecodedExample] = []
    for number, point in enumerate(sources.points):
        trace = sources.trace_of(point)
        if trace is None:
            continue
        ordered = sorted(sources.prompts_of(number), key=lambda p: trace.num_visual_tokens[p] == 0)
        prompt = next((p for p in ordered if sources.rounds_of(number, p)), None)
        if prompt is not None:
            results.append(DecodedExample(sources, number, prompt, prompts, tokens))
    return results


def data_uri(image: Image) -> str:
    """A PNG as a data URI, scaled down to ``MAX_PIXELS`` if larger."""
    small = image.copy()
    small.thumbnail((MAX_PIXELS, MAX_PIXELS))
    return png_url(small)
