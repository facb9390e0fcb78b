"""Load the decoder that a decoding profile describes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile, DraftChoice
from autotune.documents.execution import AUTO, CAPTURED
from autotune.documents.provenance import ModelReference
from autotune.drafters.checkpoint import load_draft
from autotune.errors import NotComparable, UserError, errors_about
from autotune.machine.device import choose_device, fingerprint, gib
from autotune.modeling.loading import Dtype, load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import DEFAULT_CONTEXT_TOKENS, Decoder
from autotune.runtime.points import LoadedPoint, as_draft
from autotune.runtime.preparation import decoding_mode


def load(
    profile: str | Path | DecodingProfile,
    *,
    target: Any = None,
    draft: Any = None,
    device: str = "auto",
    dtype: Dtype | None = None,
    strict: bool = False,
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    console: Console | None = None,
) -> Decoder:
    """Load a decoder that follows a profile.

    Loads the target, in ``dtype`` or the profile's precision, and the drafts that the profile names, each once, or
    takes loaded models. On another device or in another precision than the profile's, decoding is still lossless: the
    loader warns. In mode ``cuda-graph`` everything that requests of up to ``context_tokens`` tokens need is captured
    now (``Decoder.prepare``), with a progress bar on ``console``; 0 captures nothing.

    Raises:
        UserError: the profile or its models cannot be read, ``draft`` is given for points that name several drafts,
            or ``strict`` is set on another device.
        NotComparable: a model's weights differ from the profile's. Models given by the caller are not hashed.
    """
    source = "profile" if isinstance(profile, DecodingProfile) else str(profile)
    document = (
        profile if isinstance(profile, DecodingProfile) else DecodingProfile.load(Path(source)).located(Path(source))
    )
    choices = {point.draft.network: point.draft for point in document.points if point.draft is not None}
    if draft is not None and len(choices) > 1:
        raise UserError(f"{source}: its points name {len(choices)} drafts, which are loaded by name; leave draft= out")
    device_name = choose_device(device) if target is None else str(target.device)
    hardware = fingerprint(device_name)
    is_tuned_here = hardware.key == document.hardware.key
    if not is_tuned_here:
        message = f"{source}: tuned on {document.hardware.key}, this is {hardware.key}"
        if strict:
            raise UserError(f"{message}; run autotune search here, or load without strict=True")
        warnings.warn(f"{message}; output is the same, the speedup may differ", stacklevel=2)

    @functools.cache
    def checked_id(named: ModelReference) -> str:
        with errors_about(source):
            local = reference(named.id)
        if named.sha256 and local.sha256 and local.sha256 != named.sha256:
            raise NotComparable(f"{source}: {named.id} has other weights than the profile's; run autotune search again")
        return named.id

    if (model := target) is None:
        options: dict[str, Any] = {"dtype": dtype or document.dtype, "console": console}
        model = load_model(checked_id(document.target), device=device_name, **options)
    loaded = Target(model)
    if (precision := loaded.text.precision) != document.precision:
        message = f"{source}: tuned in {document.precision}, loaded in {precision}"
        warnings.warn(f"{message}; the speedup may differ", stacklevel=2)
    drafts = {
        network: load_draft(checked_id(ModelReference(id=choice.id, sha256=choice.sha256)), loaded, choice.subnet)
        if draft is None
        else as_draft(draft, loaded)
        for network, choice in choices.items()
    }
    processor = None
    if target is None or Path(getattr(target.config, "_name_or_path", "") or "?").exists():
        processor = load_processor(document.target.id if target is None else target.config._name_or_path)
    decoder = decoder_for(
        document, loaded, lambda choice: drafts[choice.network], processor=processor, is_tuned_here=is_tuned_here
    )
    if context_tokens > 0 and decoder.mode in CAPTURED:
        prepare_with_progress(decoder, context_tokens, console)
    return decoder


def prepare_with_progress(decoder: Decoder, context_tokens: int, console: Console | None = None) -> None:
    """Capture what requests can need."""
    if console is None:
        decoder.prepare(context_tokens)
        return
    with console.stage("captures") as update:
        done = decoder.prepare(context_tokens, report=lambda count, of: update(count, of, ""))
    console.say(f"{done.num_captures} forward passes captured for {context_tokens} tokens, {gib(done.memory_bytes)}")


def decoder_for(
    profile: DecodingProfile,
    target: Target,
    draft_of: Callable[[DraftChoice], Any],
    *,
    processor: Any = None,
    is_tuned_here: bool = True,
) -> Decoder:
    """The decoder of a profile whose models are loaded. Numbers of threads are those of the device that it was tuned
    on; on another one, captured forward passes run in mode ``auto``.
    """
    points = [
        LoadedPoint(
            None if point.draft is None else draft_of(point.draft),
            tree=point.tree,
            visual_keep=1.0 if point.draft is None else point.draft.subnet.visual_keep,
            visual_ranking="text_after_image" if point.draft is None else point.draft.subnet.visual_ranking,
            verification=point.verification,
            fallback=point.fallback,
            when=point.when,
        )
        for point in profile.points
    ]
    mode = profile.mode
    if mode in CAPTURED and not is_tuned_here:
        mode = decoding_mode(AUTO, target, [point.draft for point in points])
    return Decoder(
        target,
        points=points,
        capture_sizes=profile.capture_sizes if mode == profile.mode else (),
        mode=mode,
        threads=profile.threads if is_tuned_here else None,
        prefill_threads=profile.prefill_threads if is_tuned_here else None,
        processor=processor,
        profile=profile,
    )
