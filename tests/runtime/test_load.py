"""Decoders of profiles: modes, drafts and visual tokens are those of the profile's operating point."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.documents.decoding_profile import DecodingProfile
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import decoder_for, load
from autotune.trees.policy import parse_policy
from tests.runtime.conftest import TREES
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair


@pytest.fixture(scope="module")
def profile(pair: Pair) -> DecodingProfile:
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    return decoding_profile(target, draft, tree=TREES["sage"], visual_keep=0.5, hardware=fingerprint("cpu"))


def test_a_profile_of_captured_forward_passes_runs_eagerly_without_a_gpu(profile: DecodingProfile, pair: Pair) -> None:
    captured = profile.model_copy(update={"mode": "cuda-graph", "capture_sizes": (4, 8)})
    decoder = decoder_for(captured, Target(pair.target), pair.draft, is_tuned_here=False)
    assert (decoder.mode, decoder.capture_sizes) == ("eager", ())


def test_visual_tokens_are_ranked_as_the_subnet_says(
    profile: DecodingProfile, pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = profile.point.draft
    assert draft is not None
    subnet = draft.subnet.model_copy(update={"visual_ranking": "last_query"})
    point = profile.point.model_copy(update={"draft": draft.model_copy(update={"subnet": subnet})})
    decoder = load(profile.model_copy(update={"point": point}), target=pair.target)
    asked: list[Any] = []
    prefill = Target.prefill

    def observed(self: Target, prompt: Any, *, visual_rankings: Any = ()) -> Any:
        asked.append(list(visual_rankings))
        return prefill(self, prompt, visual_rankings=visual_rankings)

    monkeypatch.setattr(Target, "prefill", observed)
    decoder.generate(**prompts["image"], max_new_tokens=4)
    assert asked == [["last_query"]]


def test_a_decoder_may_be_given_another_tree(pair: Pair) -> None:
    decoder = Decoder(pair.target, pair.draft)
    draft = decoder.draft
    decoder.configure(TREES["sage"], visual_keep=0.5)
    assert decoder.draft is draft and decoder.point.policy == parse_policy(TREES["sage"])
