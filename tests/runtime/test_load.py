"""Decoders of profiles: modes, drafts and visual tokens are those of the profile's operating point."""

from __future__ import annotations

import pytest

from autotune.documents.decoding_profile import DecodingProfile
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.runtime.load import decoder_for, load
from tests.runtime.conftest import TREES
from tests.sample_documents import decoding_profile
from tests.tiny_models import Pair


@pytest.fixture(scope="module")
def profile(pair: Pair) -> DecodingProfile:
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    return decoding_profile(target, draft, tree=TREES["sage"], visual_keep=0.5, hardware=fingerprint("cpu"))


def test_a_profile_of_captured_forward_passes_runs_eagerly_without_a_gpu(profile: DecodingProfile, pair: Pair) -> None:
    captured = profile.model_copy(update={"mode": "cuda-graph", "capture_sizes": (4, 8)})
    decoder = decoder_for(captured, Target(pair.target), pair.draft, is_tuned_here=False)
    assert (decoder.mode, decoder.capture_sizes) == ("eager", ())


def test_visual_tokens_are_ranked_as_the_subnet_says(profile: DecodingProfile, pair: Pair) -> None:
    draft = profile.point.draft
    assert draft is not None
    subnet = draft.subnet.model_copy(update={"visual_ranking": "last_query"})
    point = profile.point.model_copy(update={"draft": draft.model_copy(update={"subnet": subnet})})
    decoder = load(profile.model_copy(update={"point": point}), target=pair.target)
    assert (decoder.point.visual_ranking, decoder.point.visual_keep) == ("last_query", 0.5)


def test_loading_compiles_what_rounds_run(
    profile: DecodingProfile, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no request waits for it; plain decoding has no rounds."""
    compiled: list[str] = []
    monkeypatch.setattr("autotune.runtime.load.compile_steps", lambda: compiled.append("steps"))
    plain = profile.point.model_copy(update={"draft": None, "tree": None})
    load(profile.model_copy(update={"point": plain}), target=pair.target)
    assert not compiled
    load(profile, target=pair.target)
    assert compiled == ["steps"]
