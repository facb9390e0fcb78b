"""Points that a request may choose among online, ``Decoder(adapt=True)``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autotune.acceptance.online_choice import OnlineChoice
from autotune.errors import UserError
from autotune.runtime.generate_args import Request
from autotune.runtime.points import LoadedPoint
from autotune.trees.fallback import RoundPrice


class Adaptation:
    """The online choice among a decoder's points; plain decoding is left to their fallbacks.

    Args:
        points: in order of precedence.

    Raises:
        UserError: points of different drafts or visual tokens, a lossy verification, or a point without the
            price of a round.
    """

    def __init__(self, points: Sequence[LoadedPoint]) -> None:
        self._points = points
        self._numbers = [number for number, point in enumerate(points) if point.draft is not None]
        num_variants = len({points[number].variant for number in self._numbers})
        if num_variants > 1:
            raise UserError(
                f"adapt=True needs points that share one draft and its visual tokens; these have {num_variants} of them; leave "
                "adapt out, or keep the points of one"
            )
        self._kinds = {number: (points[number].policy, _price(number, points[number])) for number in self._numbers}
        self._choices: dict[tuple[int, ...], OnlineChoice] = {}

    def candidates(self, request: Request) -> dict[int, LoadedPoint]:
        """Points, by index, that a request may choose among, those for certain context lengths included; its own comes first.

        These are the points with another tree or price whose conditions the request meets apart from ``workload``, which
        nobody may have told. None if the request's own point has no draft.
        """
        own = request.stats.point
        if own not in self._numbers:
            return {}
        found: dict[object, int] = {}
        for number in [own, *self._numbers]:
            point = self._points[number]
            condition = point.when.model_copy(update={"workload": None, "context_tokens": None})
            if number == own or condition.matches(
                temperature=request.call.temperature,
                prompt_tokens=len(request.prompt),
                has_image=request.prompt.num_visual_tokens > 0,
                workload=None,
            ):
                found.setdefault((self._kinds[number], point.when.context_tokens), number)
        return {number: self._points[number] for number in found.values()}

    def choice(self, candidates: Collection[int]) -> OnlineChoice:
        """The choice among some points; requests share it one after the other."""
        numbers = tuple(candidates)
        if numbers not in self._choices:
            self._choices[numbers] = OnlineChoice({number: self._kinds[number] for number in numbers})
        return self._choices[numbers]


def _price(number: int, point: LoadedPoint) -> RoundPrice:
    """The price of a point's rounds.

    Raises:
        UserError: it has none, or its rounds cannot be replayed while decoding.
    """
    if not point.verification.is_lossless:
        raise UserError(
            f"adapt=True needs lossless verification, and point {number} has {point.verification.kind}; leave adapt out, or "
            "verify losslessly"
        )
    if point.fallback.price is None:
        raise UserError(
            f"adapt=True needs the price of a round, and point {number} has no fallback; leave adapt out, or run autotune "
            "search, which writes it"
        )
    return point.fallback.price
