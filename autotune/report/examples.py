"""The report's example: a recorded prompt, its answer by rounds, and the tree of one round. Loads no model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.modeling.loading import load_processor, resolve
from autotune.replay.reference_replay import ReplayedRound
from autotune.report.sources import Sources
from autotune.trees.tree import ROOT
from autotune.workloads.pixels import png_url
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 448  # of an image's longer side
MAX_IMAGES = 4


def find_prompts(sources: Sources, workload: str | None) -> dict[str, WorkloadPrompt]:
    """The recorded prompts by name; empty if they cannot be found or have changed since.

    Raises:
        UserError: the workload that the user gave cannot be read, or is not the recorded one.
    """
    if not sources.traces or sources.study is None or sources.folder is None:
        return {}
    header, name = sources.traces[0].header, workload or sources.study.workload
    for path in (name, str(sources.folder.resolve().parents[1] / name)):  # or where .autotune is, and the search ran
        with nullcontext() if workload else suppress(UserError):
            loaded = load_workload(path, "tune", num_prompts=len(header.prompts))
            searched = loaded if sources.profile is None else loaded.as_searched(sources.profile.workload)
            for candidate in (loaded, searched):
                if candidate.sha256 == header.workload_sha256:
                    return {prompt.name: prompt for prompt in candidate.prompts}
            if workload is not None:
                raise UserError(
                    f"--workload {workload}: its prompts differ from the recorded ones; give the search's own"
                )
    return {}


class TokenTexts:
    """Tokens as text by the target's tokenizer, or as numbers without one."""

    def __init__(self, target: str) -> None:
        self.tokenizer = _tokenizer(target)

    def text(self, before: list[int], token: int) -> str:
        """The text that a token adds after ``before``; many tokenizers join words, and bytes of one character."""
        if self.tokenizer is None:
            return f"[{token}]"
        if token < 0 or self.tokenizer.id_to_token(token) is None:
            return "?"
        context = before[-8:]
        prefix = self.tokenizer.decode(context, skip_special_tokens=False)
        text = self.tokenizer.decode([*context, token], skip_special_tokens=False)
        return text[len(prefix) :] if text.startswith(prefix) else str(self.tokenizer.id_to_token(token))


def _tokenizer(target: str) -> Any | None:
    """``tokenizer.json`` from the target's folder or the Hugging Face cache, or a GGUF file's tokenizer; nothing is
    downloaded.
    """
    try:
        path = Path(resolve(target, weights=False, local_only=True))
        from tokenizers import Tokenizer

        return (
            load_processor(str(path)).backend_tokenizer
            if path.is_file()
            else Tokenizer.from_file(str(path / "tokenizer.json"))
        )
    except Exception:  # tokenizers raises bare exceptions; the report works without texts
        return None


@dataclass
class TreeNode:
    """A drafted token; children are in the order in which the tree has them."""

    text: str
    share: float
    """The draft's probability after the parent."""
    is_accepted: bool
    children: list[TreeNode] = field(default_factory=list)


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
        asked = prompts.get(self.prompt)
        self.question = None if asked is None else asked.settings.text
        self.images = [] if asked is None else [data_uri(image) for image in asked.pictures[:MAX_IMAGES]]
        self.texts, self.rounds = texts, decoded  # the first token is of the prefill
        self.tokens_per_round = (len(answer) - 1) / len(decoded)
        self.drawn, self.shown = drawn + 1, decoded[drawn]
        self.root = _nodes(self.shown, texts, answer, tokens)


def _nodes(shown: ReplayedRound, texts: list[str], answer: list[int], tokens: TokenTexts) -> TreeNode | None:
    """The root of a round's tree; None for a plain step. The text of a node depends on its ancestors."""
    tree = shown.tree
    if tree is None:
        return None
    accepted = set(shown.path.tolist())
    nodes = [TreeNode(texts[shown.position], 1.0, True)]
    prefixes = [answer[: shown.position + 1]]  # of each node, with its own token
    for node in range(ROOT + 1, int(tree.size[0])):
        parent, token = int(tree.parent[node]), int(tree.token[node])
        before = tree.path_probability[parent]  # 0 of retrieved tokens
        share = float(tree.path_probability[node] / before) if before > 0 else 0.0
        nodes.append(TreeNode(tokens.text(prefixes[parent], token), share, node in accepted))
        prefixes.append([*prefixes[parent], token])
        nodes[parent].children.append(nodes[node])
    return nodes[ROOT]


def decoded_example(sources: Sources, prompts: dict[str, WorkloadPrompt], tokens: TokenTexts) -> DecodedExample | None:
    """The first recorded prompt with an image that is decoded by rounds, or the first prompt; None without a trace."""
    if (trace := sources.trace) is None:
        return None
    ordered = sorted(range(len(trace.header.prompts)), key=lambda prompt: trace.num_visual_tokens[prompt] == 0)
    prompt = next((prompt for prompt in ordered if sources.rounds_of(prompt)), None)
    return None if prompt is None else DecodedExample(sources, prompt, prompts, tokens)


def visible(text: str) -> str:
    """A token's text with visible white space: ``·`` a space, ``⏎`` a line break."""
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def data_uri(image: Image) -> str:
    """A PNG as a data URI, scaled down to ``MAX_PIXELS`` if larger."""
    small = image.copy()
    small.thumbnail((MAX_PIXELS, MAX_PIXELS))
    return png_url(small)
