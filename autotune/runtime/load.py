"""From a decoding profile to a decoder."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.device import choose_device, fingerprint
from autotune.documents.decoding_profile import DecodingProfile, DraftChoice
from autotune.documents.provenance import ModelReference
from autotune.drafters.checkpoint import load_draft
from autotune.errors import NotComparable, UserError
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import LoadedPoint, as_draft


def load(
    profile: str | Path | DecodingProfile,
    *,
    target: Any = None,
    draft: Any = None,
    device: str = "auto",
    strict: bool = False,
) -> Decoder:
    """A decoder that obeys a profile.

    Loads the target and draft that the profile names, or takes loaded models. On another device than the profile was
    made for it says so in a warning and decodes anyway, for that is lossless all the same. What the points need is loaded
    here, each draft once, so that the decoder switches between them at no cost.

    Raises:
        UserError: the profile or its models cannot be read; a draft given for points that name several; with ``strict``,
            another device.
        NotComparable: a model's weights are not those of the profile (models given by the caller are not hashed).
    """
    source = "profile" if isinstance(profile, DecodingProfile) else str(profile)
    document = profile if isinstance(profile, DecodingProfile) else DecodingProfile.load(Path(profile))
    networks = {point.draft.network: point.draft for point in document.points if point.draft is not None}
    if draft is not None and len(networks) > 1:
        raise UserError(
            f"{source}: its points name {len(networks)} drafts; leave draft= out, and they are loaded by name"
        )
    device_name = choose_device(device) if target is None else str(target.device)
    here = fingerprint(device_name)
    if here.key != document.hardware.key:
        message = f"{source}: tuned on {document.hardware.key}, this is {here.key}"
        if strict:
            raise UserError(f"{message}; run autotune search here, or load without strict=True")
        warnings.warn(f"{message}; output is the same, the speedup may differ", stacklevel=2)

    @functools.cache
    def checked(reference_in_profile: ModelReference) -> str:
        found = reference(reference_in_profile.id)
        if reference_in_profile.sha256 and found.sha256 and found.sha256 != reference_in_profile.sha256:
            raise NotComparable(
                f"{source}: {reference_in_profile.id} has other weights than when the profile was made; run autotune search again"
            )
        return reference_in_profile.id

    loaded = Target(load_model(checked(document.target), device=device_name) if target is None else target)
    drafts = {
        network: load_draft(checked(ModelReference(id=choice.id, sha256=choice.sha256)), loaded, choice.subnet)
        if draft is None
        else as_draft(draft)
        for network, choice in networks.items()
    }
    processor = None
    if target is None or Path(getattr(target.config, "_name_or_path", "") or "?").exists():
        processor = load_processor(document.target.id if target is None else target.config._name_or_path)
    return decoder_for(
        document,
        loaded,
        lambda choice: drafts[choice.network],
        processor=processor,
        threads=document.threads if here.key == document.hardware.key else None,
    )


def decoder_for(
    profile: DecodingProfile,
    target: Any,
    draft_of: Callable[[DraftChoice], Any],
    *,
    processor: Any = None,
    threads: int | None = None,
) -> Decoder:
    """A decoder that obeys a profile, of loaded models."""
    return Decoder(
        target,
        points=[
            LoadedPoint(
                None if point.draft is None else draft_of(point.draft),
                tree=point.tree,
                visual_keep=1.0 if point.draft is None else point.draft.subnet.visual_keep,
                verification=point.verification,
                fallback=point.fallback,
                when=point.when,
            )
            for point in profile.points
        ],
        capture_sizes=profile.capture_sizes,
        mode=profile.mode,
        threads=threads,
        processor=processor,
        profile=profile,
    )
