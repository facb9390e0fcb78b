"""vLLM's ``suffix``: the most frequent continuation of the text's suffixes, in the request and in earlier answers
(SuffixDecoding, arXiv 2411.04975).

The rules are those of arctic-inference 0.1.1, whose trees of suffixes give the same drafts as these lists of places. No
torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from autotune.engines.ngram_drafters import Drafter, KnownRequest

SEPARATOR = -1  # before every answer in a text of several


class SuffixDrafter(Drafter):
    """Drafts from the request, or from all answers of the server where these score more: the sum of the tokens'
    estimated probabilities.

    Answers are kept as they were generated, with what was accepted beyond their ends. Drafts reach beyond the end too.
    """

    ends_with_answer = False

    def __init__(self, depth: int, factor: float, least: float, most: int) -> None:
        """
        Args:
            depth: of the trees: most tokens of a suffix with its draft.
            factor: draft tokens for each token of the suffix, at most.
            least: probability of a draft token.
            most: draft tokens.
        """
        self.depth, self.factor, self.least, self.most = depth, factor, least, most
        self.answers: list[int] = []
        self.ends: dict[int, list[int]] = {}  # places after each token of the answers
        self.request: KnownRequest | None = None
        self.length = self.entered = self.accepted = 0

    def begin(self, request: KnownRequest) -> None:
        self._keep(self.length + self.accepted + 2)
        self.answers.append(SEPARATOR)
        self.request, self.entered, self.accepted = request, request.prompt_length, 0
        self.length = request.prompt_length - 1

    def _keep(self, end: int) -> None:
        """Add the generated tokens before ``end`` to the answers."""
        for token in self.request.tokens[self.entered : end] if self.request else ():
            self.answers.append(token)
            self.ends.setdefault(token, []).append(len(self.answers))
        self.entered = end

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        self.length, self.accepted = length, 0
        self._keep(length + 1)
        text = request.tokens[: length + 1]
        places = request.places(1)[text[-1],]
        context, read = text[-self.depth :], places[: bisect.bisect_right(places, length)]
        of_request = self._best(text, context, [place + 1 for place in read])
        of_answers = self._best(self.answers, context, self.ends[text[-1]])
        return (of_request if of_request[0] >= of_answers[0] else of_answers)[1]

    def accept(self, accepted: int) -> None:
        self.accepted = accepted

    def _best(self, text: list[int], context: list[int], ends: list[int]) -> tuple[float, list[int]]:
        """The draft of the highest score over the suffixes of the context, of equal ones that of the longest suffix.

        ``ends`` are the places after the context's last token in the text, in their order.
        """
        best = (0.0, list[int]())
        for n in range(1, len(context)):
            ends = [end for end in ends if end >= n and text[end - n] == context[-n]]
            if not ends:
                break
            room = min(self.most, int(n * self.factor + 1e-6), self.depth - n)
            best = max(self._follow(text, ends, room), best, key=lambda draft: draft[0])
        return best

    def _follow(self, text: list[int], ends: list[int], room: int) -> tuple[float, list[int]]:
        """Score and tokens of the likeliest continuation, token by token, of the occurrences that end there. In single
        precision.
        """
        score, probability, draft = np.float32(0), np.float32(1), list[int]()
        while len(draft) < room:
            following = [text[end] for end in ends if end < len(text) and text[end] != SEPARATOR]
            if not following:
                break
            token, count = most_frequent(following)
            probability *= np.float32(count) / np.float32(len(ends))
            if probability < np.float32(self.least):
                break
            draft.append(token)
            score += probability
            ends = [end + 1 for end in ends if end < len(text) and text[end] == token]
        return float(score), draft


def most_frequent(tokens: Sequence[int]) -> tuple[int, int]:
    """The most frequent token with its count, for tokens in the order in which they occurred. A token that draws level
    with others stands behind them if some had its former count with it, and else before them, so that history decides
    among equal counts.
    """
    order, counts = list[int](), dict[int, int]()
    for token in tokens:
        if token not in counts:
            order.append(token)
        elif (place := order.index(token)) and counts[order[place - 1]] <= counts[token] + 1:
            level = counts[order[place - 1]]
            order.insert(next(at for at, one in enumerate(order) if counts[one] == level), order.pop(place))
        counts[token] = counts.get(token, 0) + 1
    return order[0], counts[order[0]]
