"""The report's example: a recorded prompt, its answer by rounds, and the tree of one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.replay.reference_replay import ReplayedRound
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
    def __init__(self, sources: Sources, prompt: int, prompts: dict[str, WorkloadPrompt], tokens: TokenTexts) -> None:
        """``prompt`` is the number of the prompt in the trace; ``prompts`` are the workload's, if they were found."""
        assert sources.profile is not None and sources.profile.point.tree is not None
        trace, decoded = sources.trace, sources.rounds_of(prompt)
        assert trace is not None
        drawn = round_to_draw(decoded)
        answer = trace.forest.answer[trace.answer_start[prompt] : trace.answer_start[prompt + 1]].tolist()
        texts = [tokens.text(answer[:position], token) for position, token in enumerate(answer)]
        self.policy = sources.profile.point.tree.policy
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


def decoded_example(sources: Sources, prompts: dict[str, WorkloadPrompt], tokens: TokenTexts) -> DecodedExample | None:
    """The first recorded prompt with an image that is decoded by rounds, or the first prompt; None without a trace."""
    if (trace := sources.trace) is None:
        return None
    ordered = sorted(range(len(trace.header.prompts)), key=lambda prompt: trace.num_visual_tokens[prompt] == 0)
    prompt = next((prompt for prompt in ordered if sources.rounds_of(prompt)), None)
    return None if prompt is None else DecodedExample(sources, prompt, prompts, tokens)


def data_uri(image: Image) -> str:
    """A PNG as a data URI, scaled down to ``MAX_PIXELS`` if larger."""
    small = image.copy()
    small.thumbnail((MAX_PIXELS, MAX_PIXELS))
    return png_url(small)
