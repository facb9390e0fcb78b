"""Load the decoder that a decoding profile describes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import DecodingProfile, DraftChoice
from autotune.documents.execution import AUTO, CAPTURED
from autotune.documents.provenance import ModelReference
from autotune.drafters.checkpoint import load_draft
from autotune.errors import NotComparable, UserError, errors_about
from autotune.machine.device import choose_device, fingerprint, gib
from autotune.modeling.hub import profile_file
from autotune.modeling.loading import Dtype, load_processor, reference
from autotune.modeling.sharded import load_target
from autotune.modeling.target import Target
from autotune.runtime.decoder import DEFAULT_CONTEXT_TOKENS, Decoder
from autotune.runtime.points import as_draft
from autotune.runtime.preparation import decoding_mode
from autotune.trees.policy import compile_steps


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

    The profile is a file, ``OWNER/NAME`` of the Hugging Face Hub, or a document. Loads the target, in ``dtype`` or the
    profile's precision, and the draft that the profile names, or takes loaded models. On another device or in another
    precision than the profile's, decoding is still lossless: the loader warns. In mode ``cuda-graph`` everything that
    requests of up to ``context_tokens`` tokens need is captured now (``Decoder.prepare``), with a progress bar on
    ``console``; 0 captures nothing.

    Raises:
        UserError: the profile or its models cannot be read, or ``strict`` is set on another device.
        NotComparable: a model's weights differ from the profile's. Models given by the caller are not hashed.
    """
    if isinstance(profile, DecodingProfile):
        source, document = "profile", profile
    else:
        source, path = str(profile), profile_file(profile)
        document = DecodingProfile.load(path).located(path)
    here = choose_device(device) if target is None else str(target.device)
    is_tuned_here = _is_tuned_on(here, document, source, strict=strict)
    if target is not None:
        loaded = Target(target)
    else:
        options: dict[str, Any] = {"dtype": dtype or document.dtype, "console": console}
        loaded = load_target(_checked_id(document.target, source), device=here, **options)
    if (precision := loaded.text.precision) != document.precision:
        message = f"{source}: tuned in {document.precision}, loaded in {precision}"
        warnings.warn(f"{message}; the speedup may differ", stacklevel=2)
    choice = document.point.draft
    if choice is None or draft is None:
        draft = choice and load_draft(_checked_id(choice, source), loaded, choice.subnet)
    if draft is not None:
        compile_steps()  # the first request does not wait for it
    folder = document.target.id if target is None else getattr(target.config, "_name_or_path", "")
    has_processor = target is None or (folder and Path(folder).exists())
    processor = load_processor(folder) if has_processor else None
    decoder = decoder_for(document, loaded, draft, processor=processor, is_tuned_here=is_tuned_here)
    if context_tokens > 0 and decoder.mode in CAPTURED:
        prepare_with_progress(decoder, context_tokens, console)
    return decoder


def _is_tuned_on(device: str, profile: DecodingProfile, source: str, *, strict: bool) -> bool:
    """Whether the profile was tuned on such a device; if not, it warns, or raises if ``strict``."""
    hardware = fingerprint(device)
    if hardware.key == profile.hardware.key:
        return True
    message = f"{source}: tuned on {profile.hardware.key}, this is {hardware.key}"
    if strict:
        raise UserError(f"{message}; run autotune search here, or load without strict=True")
    warnings.warn(f"{message}; output is the same, the speedup may differ", stacklevel=3)
    return False


def _checked_id(named: ModelReference | DraftChoice, source: str) -> str:
    """The id of a model of the profile, whose weights are the profile's."""
    with errors_about(source):
        local = reference(named.id)
    if named.sha256 and local.sha256 and local.sha256 != named.sha256:
        raise NotComparable(f"{source}: {named.id} has other weights than the profile's; run autotune search again")
    return named.id


def prepare_with_progress(decoder: Decoder, context_tokens: int, console: Console | None = None) -> None:
    """Capture what requests can need."""
    if console is None:
        decoder.prepare(context_tokens)
        return
    with console.stage("captures") as update:
        done = decoder.prepare(context_tokens, report=lambda count, of: update(count, of, ""))
    console.say(f"{done.num_captures} forward passes captured for {context_tokens} tokens, {gib(done.memory_bytes)}")


def decoder_for(
    profile: DecodingProfile, target: Target, draft: Any, *, processor: Any = None, is_tuned_here: bool = True
) -> Decoder:
    """The decoder of a profile whose models are loaded. Numbers of threads are those of the device that it was tuned
    on; on another one, and in several processes, captured forward passes run in mode ``auto``.
    """
    draft, mode = as_draft(draft, target), profile.mode
    if mode in CAPTURED and not (is_tuned_here and target.ranks is None):
        mode = decoding_mode(AUTO, target, [draft])
    return configured_decoder(
        target,
        draft,
        configuration_of(profile.point) or Configuration(tree={"policy": "chain"}),
        capture_sizes=profile.capture_sizes if mode == profile.mode else (),
        mode=mode,
        threads=profile.threads if is_tuned_here else None,
        prefill_threads=profile.prefill_threads if is_tuned_here else None,
        processor=processor,
        profile=profile,
    )


def configured_decoder(target: Target, draft: Any, configuration: Configuration, **options: Any) -> Decoder:
    """A decoder with the tree, the visual tokens and the verification of a configuration. ``options`` are other
    arguments of ``Decoder``.
    """
    return Decoder(
        target,
        draft,
        tree=configuration.tree,
        visual_keep=configuration.subnet.visual_keep,
        visual_ranking=configuration.subnet.visual_ranking,
        verification=configuration.verification,
        fallback=configuration.fallback,
        **options,
    )
