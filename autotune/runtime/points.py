"""The operating point of a decoder, with its models and policies loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.documents.subnet import VISUAL_RANKINGS, VisualRanking
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.draft import Draft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError, nearest
from autotune.modeling.loading import load_tokenizer
from autotune.modeling.target import Target
from autotune.runtime.token_sampler import COUPLED_TEMPERATURE, TokenSampler
from autotune.trees.fallback import Fallback, RoundPrice
from autotune.trees.policy import TreeGrower, parse_policy
from autotune.trees.verification import parse_verification


class LoadedPoint:
    """Runtime state of an operating point: draft, tree policy, verification, fallback.

    Args:
        tree: a tree policy, ``{"policy": "sage", "d_max": 8, ...}``; the paper's defaults fill in what is left out.
        visual_keep: share of visual tokens that the draft reads, in (0, 1].
        visual_ranking: how these tokens are chosen, one of ``VISUAL_RANKINGS``.
        verification: how draft tokens are accepted. Lossless by default; ``{"kind": "wetap", "threshold": 0.9}`` is
            lossy.
        fallback: the cost of a round in plain steps. With it, a request falls back to plain steps while rounds do not
            pay.
        coupled: above temperature 0, rank draft tokens with the noise that the target's tokens are drawn with. More of
            them are accepted and the output is the same; False is for comparison. Lossy verification is never coupled.

    Raises:
        UserError: an unknown tree policy, hyperparameter or verification, or ranking, or ``visual_keep`` out of range.
    """

    def __init__(
        self,
        draft: Any | None,
        *,
        tree: Any = None,
        visual_keep: float = 1.0,
        visual_ranking: VisualRanking = "text_after_image",
        verification: Any = None,
        fallback: RoundPrice | None = None,
        coupled: bool = True,
    ) -> None:
        if not 0.0 < visual_keep <= 1.0:
            raise UserError(f"visual_keep must be above 0 and at most 1; got {visual_keep}; 1 keeps every visual token")
        if visual_ranking not in VISUAL_RANKINGS:
            raise UserError(f"unknown visual_ranking {visual_ranking!r}; {nearest(visual_ranking, VISUAL_RANKINGS)}")
        self.draft = as_draft(draft)
        self.policy = parse_policy({"policy": "chain"} if tree is None else tree)
        self.grower = TreeGrower(self.policy)
        self.visual_keep = visual_keep
        self.visual_ranking = visual_ranking
        self.verification = parse_verification(verification)
        self.fallback = Fallback(fallback)
        self.is_coupled = coupled and self.verification.is_lossless

    def coupling_sampler(self, sampler: TokenSampler) -> TokenSampler | None:
        """The sampler of a request, if the draft's proposals are coupled to it: the request samples, the verification
        is lossless, and coupling is not switched off.
        """
        return sampler if self.is_coupled and sampler.temperature >= COUPLED_TEMPERATURE else None


def check_paths(point: LoadedPoint, target: Target) -> None:
    """Refuse a tree policy that branches for models with recurrent or convolution states, which follow one path."""
    if point.draft is None or point.policy.is_chain:
        return
    for model in (target, point.draft):
        if model.has_states:
            raise UserError(
                f"{model.description} keeps recurrent or convolution states, which follow one path: it decodes chains, not "
                f"trees; got {point.policy.label}; choose the policy chain"
            )


def as_draft(draft: Any | None, target: Target | None = None) -> Draft | None:
    """The draft of an operating point: a draft or None as it is, a Hugging Face model as an independent draft, or the
    draft that ``load_draft`` loads by name for ``target``.

    Raises:
        UserError: neither of these.
    """
    if draft is None or (hasattr(draft, "propose") and not isinstance(draft, type)):
        return draft
    if isinstance(draft, (str, Path)) and target is not None:
        return load_draft(str(draft), target)
    if not hasattr(draft, "get_decoder") or isinstance(draft, type):
        raise UserError(
            f"a draft is a loaded model, a name that Decoder(target, draft=...) loads, or None; got {' '.join(repr(draft).split()):.60}; "
            "give one of them"
        )
    folder = getattr(draft.config, "_name_or_path", "") or "?"
    return IndependentDraft(draft, tokenizer=load_tokenizer(folder) if Path(folder).is_dir() else None)
