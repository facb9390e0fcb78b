"""Replay of engines' drafts: against transcripts of the real servers, and against the obvious rules."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.documents.decoded import num_passes, tokens_per_pass
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.ngram_drafters import KnownRequest, slot_of
from autotune.engines.replay import new_drafter, replay_speculation
from autotune.engines.served import Served
from tests.engines import recorded_llama, recorded_vllm
from tests.engines.recorded_llama import CONTEXT


def speculation(kind: str, *values: float) -> Speculation:
    return Speculation(type=kind, options=dict(zip(OPTIONS[kind], values, strict=True)))


@pytest.mark.parametrize(
    ("path", "least"),
    [(recorded_llama.TRANSCRIPT, 5), (recorded_vllm.TRANSCRIPT, 15), (recorded_vllm.IMAGE_TRANSCRIPT, 3)],
)
def test_replay_gives_the_counts_of_the_real_server(path: Path, least: int) -> None:
    """The last two requests of a server are the first two again. Older rows lack the verifications of each request."""
    found = json.loads(path.read_text())
    fields = [{key: row[key] for key in row if key not in ("text", "image")} for row in found["prompts"]]
    known = [KnownRequest(Served.of(**row)) for row in fields]
    accepted = Counter[str]()
    for server in found["servers"]:
        settings, counts = Speculation(**server["speculation"]), server["counts"]
        replays = replay_speculation(settings, [*known[: len(counts) - 2], *known[:2]], CONTEXT)
        rounds = server.get("verifications", sum(row[0] for row in counts))
        assert [list(one.counts[-len(counts[0]) :]) for one in replays] == counts, settings
        assert sum(one.counts[0] for one in replays) == rounds, settings
        accepted[settings.type] += sum(row[-1] for row in counts)
    assert len(found["servers"]) >= least and len(accepted) == 2 and all(accepted.values())


def obvious_simple(tokens: list[int], n: int, m: int) -> list[int]:
    length = len(tokens) - 1
    for start in range(length - n - 1, 0, -1) if length > n + m + 1 else ():
        if tokens[start : start + n] == tokens[-n:]:
            draft = tokens[start + n : length][:m]
            return draft if len(draft) >= n else []
    return []


def obvious_mod(tokens: list[int], n: int, least: int, most: int) -> list[int]:
    """The pool holds the prompt's n-grams."""

    pool = {slot_of(tokens[i : i + n]): tokens[i + n] for i in range(50 - n)}
    draft = list(tokens)
    for index in range(most):
        token = pool.get(slot_of(draft[-n:]))
        if token is None:
            return draft[len(tokens) :] if index >= least else []
        draft.append(token)
    return draft[len(tokens) :]


def obvious_lookup(tokens: list[int], shortest: int, longest: int, k: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n :][:k]
    return []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "rule", "settings"),
    [
        ("ngram-simple", obvious_simple, [(1, 4), (2, 3), (3, 8), (5, 5)]),
        ("ngram-mod", obvious_mod, [(1, 0, 4), (2, 0, 3), (3, 2, 8), (5, 0, 5)]),
        ("ngram", obvious_lookup, [(1, 1, 3), (2, 4, 8), (5, 5, 2), (1, 12, 30)]),
    ],
)
def test_fast_drafts_are_those_of_the_obvious_rules(
    kind: str, rule: Callable[..., list[int]], settings: list[tuple[int, ...]], seed: int
) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(3) for _ in range(150)]
    request = KnownRequest(Served.of(tokens[:50], tokens[50:], 100))
    for numbers in settings:
        drafter = new_drafter(speculation(kind, *numbers))
        drafter.begin(request)
        for length in range(50, 78):  # later the pool takes in what was generated
            assert drafter.draft(request, length) == rule(tokens[: length + 1], *numbers), (numbers, length)


@pytest.mark.parametrize(
    ("settings", "answer", "context", "drafts"),
    [
        (("ngram-mod", 2, 0, 64), {}, CONTEXT, [(2, 2)]),  # cut to what the request may still generate
        (("ngram", 2, 2, 8), {"beyond": [5, 6, 7, 8, 3], "is_ended": True}, CONTEXT, [(8, 7)]),
        (("ngram", 2, 2, 8), {"beyond": [5, 6], "is_ended": True}, CONTEXT, [(8, 5)]),
        (("ngram", 2, 2, 8), {"beyond": [5, 6, 7, 8, 3], "is_ended": True}, 36, [(2, 2)]),
    ],
)
def test_llama_cuts_drafts_to_the_answer_and_vllm_to_the_context(
    settings: tuple[Any, ...], answer: dict[str, Any], context: int, drafts: list[tuple[int, int]]
) -> None:
    request = KnownRequest(Served.of([1, 2, 3, 4, 5, 6, 7, 8] * 4, [1, 2, 3, 4], 4, **answer))
    (replayed,) = replay_speculation(speculation(*settings), [request], context)
    assert replayed.drafts[:1] == drafts and replayed.num_tokens == 3


class SuffixTrie:
    """Suffixes of texts token by token, as the obvious tree: a node's children in the order that arctic-inference's
    linked lists keep.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.root = depth, Node()
        self.ends: list[Node] = []

    def append(self, token: int) -> None:
        self.root.count += 1
        self.ends = [node.child(token) for node in [*self.ends, self.root][-self.depth :]]

    def best(self, context: list[int], factor: float, least: float, most: int) -> tuple[float, list[int]]:
        best = (0.0, list[int]())
        for n in range(1, len(context)):
            node: Node | None = self.root
            for token in context[-n:]:
                node = node and next((one for one in node.children if one.token == token), None)
            if node is None:
                break
            score, probability, draft = np.float32(0), np.float32(1), list[int]()
            while len(draft) < min(most, int(n * factor + 1e-6)) and node.children:
                probability *= np.float32(node.children[0].count) / np.float32(node.count)
                node = node.children[0]
                if probability < np.float32(least):
                    break
                score += probability
                draft.append(node.token)
            if score >= best[0]:
                best = (float(score), draft)
        return best


class Node:
    def __init__(self, token: int = -1) -> None:
        self.token, self.count, self.children = token, 0, list[Node]()

    def child(self, token: int) -> Node:
        """The child whose count grows by one, in its new place: at the head of the group of siblings that it joins or
        leaves.
        """
        place = next((place for place, one in enumerate(self.children) if one.token == token), len(self.children))
        if place == len(self.children):
            self.children.append(Node(token))
        child = self.children[place]
        child.count += 1
        if child.count > 1 and place and self.children[place - 1].count <= child.count:
            level = self.children[place - 1].count
            del self.children[place]
            self.children.insert(next(at for at, one in enumerate(self.children) if one.count == level), child)
        return child


@pytest.mark.parametrize("seed", range(4))
def test_suffix_drafts_are_those_of_a_tree_of_suffixes(seed: int) -> None:
    """In the request and in all answers, over several requests, each with what was accepted beyond its end."""
    draw = random.Random(seed)
    for depth, factor, least, most in itertools.product((4, 24), (0.5, 2.0), (0.05, 0.3), (3, 24)):
        drafter, shared = new_drafter(speculation("suffix", depth, factor, least, most)), SuffixTrie(depth)
        drafted = 0
        for _ in range(3):
            size, first = 40, draw.randrange(1, 10)
            tokens = [draw.randrange(draw.choice((2, 4))) for _ in range(size)]
            request = KnownRequest(Served.of(tokens[:first], tokens[first:], 99))
            own, length, read = SuffixTrie(depth), first, first
            shared.ends = []
            for token in tokens[:first]:
                own.append(token)
            drafter.begin(request)
            while length + 1 < size:
                for token in tokens[read : length + 1]:
                    own.append(token)
                    shared.append(token)
                read, context = length + 1, tokens[: length + 1][-depth:]
                drafts = [tree.best(context, factor, least, most) for tree in (own, shared)]
                found = drafter.draft(request, length)
                assert found == (drafts[0][1] if drafts[0][0] >= drafts[1][0] else drafts[1][1])
                drafted += len(found)
                pairs = enumerate(zip(found, tokens[length + 1 :], strict=False))
                accepted = next((n for n, pair in pairs if pair[0] != pair[1]), 0)
                if found:
                    drafter.accept(accepted)
                length += accepted + 1
            for token in tokens[read : length + 1]:
                shared.append(token)
        assert drafted > 20


def test_passes_are_counted_where_accepted_tokens_lie_beyond_the_end() -> None:
    """Seven verifications of drafts of five, all accepted, for 40 tokens: vLLM counts two tokens too many. The other
    request has passes without a draft.
    """
    assert num_passes(40, 7, 35) == 7 and num_passes(40, 4, 10) == 30
    assert tokens_per_pass([(40, 7, 35), (40, 4, 10)]) == 80 / 37
    assert tokens_per_pass([(0, 0, 0)]) == 0
