"""``autotune export``: the configuration of a serving engine nearest to a profile, found by replay in the engine's space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.trace import Trace
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile, Predicted
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.export.document import EXPORT, Export, Variant, print_export
from autotune.export.engine import Candidate, Engine, Pair, Vision, read_settings, write_settings
from autotune.export.engine_prices import EnginePrices
from autotune.export.engine_replay import EngineReplay, MeasuredReplay
from autotune.export.llama_cpp import LlamaCpp
from autotune.export.model_files import find_model
from autotune.export.search_documents import SearchDocuments, find_search_documents
from autotune.export.sglang import Sglang
from autotune.export.tensorrt_llm import TensorRtLlm
from autotune.export.transformers import Transformers
from autotune.export.vllm import Vllm
from autotune.files import require_writable
from autotune.modeling.loading import GEMMA4_ASSISTANT, bundled_models
from autotune.study.folder import points_of_prompts
from autotune.trees.chain import ChainPolicy

ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "tensorrt-llm": TensorRtLlm(),
    "llama.cpp": LlamaCpp(),
    "transformers": Transformers(),
}
UNCHECKED = (GEMMA4_ASSISTANT,)
"""Draft kinds that some engines serve, with settings of which none were checked."""


def export_profile(
    source: Path,
    engine_name: str,
    console: Console,
    *,
    study: Path | None = None,
    point: int | None = None,
    draft: str | None = None,
    draft_tokens: int | None = None,
    prices: Path | None = None,
    engine_version: str | None = None,
    output: Path | None = None,
) -> Export:
    """Write an engine's settings for a profile, and a document with their predictions beside them.

    ``point`` exports one point, for a server of its requests only; None: the last point, for all requests. ``draft``
    exports another recorded draft in place of the point's. ``draft_tokens`` exports the chain of this length, however fast it
    is predicted to be. ``prices`` is a file of prices that were measured in the engine, in place of the search's cost table.

    Raises:
        UserError: the profile or its study cannot be read, there is no such point, draft, chain or version, the engine does not serve
            the draft, the draft was not recorded as the engine shows it images, or nothing is predicted to be faster than plain
            decoding.
    """
    engine, profile = ENGINES[engine_name].of_version(engine_version), DecodingProfile.load(source)
    folder = output or Path("exports") / engine_name
    require_writable(folder / EXPORT)
    last = len(profile.points) - 1
    number = last if point is None else point
    if not 0 <= number <= last:
        raise UserError(f"--point {point}: {source} has points 0 to {last}; give one of them, or leave --point out")
    if draft_tokens is not None and isinstance(engine, LlamaCpp):
        raise UserError(
            f"--draft-tokens {draft_tokens}: llama.cpp's chains have a floor of confidence; leave the option out"
        )
    selected = profile.points[number]
    if draft is None and selected.draft is None:
        raise UserError(
            f"{source}: point {number} decodes without a draft, so there is nothing to export; serve the target alone"
        )
    name = draft or (selected.draft.id if selected.draft else "")
    found = find_search_documents(profile, source, study)
    documents = next((candidate for candidate in found if candidate.reproduces(selected)), found[0])
    kind = _served_kind(documents, profile, engine_name, name)
    trace = _engine_trace(engine, documents, profile, name, kind)
    prompts = np.ones(trace.num_prompts, bool) if point is None else points_of_prompts(profile, trace) == number
    if not prompts.any():
        raise UserError(
            f"--point {number}: no tuning prompt meets its condition, {selected.when.label}; leave --point out"
        )
    if engine.vision[kind] == "text":
        prompts &= trace.num_visual_tokens == 0
        if not prompts.any():
            raise UserError(
                f"{engine_name}: a draft of kind {kind} is exported for prompts without images, because what the engine shows it of an "
                "image is not what autotune records, and every tuning prompt has one; export to another engine, or search with text"
            )
    tuned = documents.predict(selected, trace, prompts)
    pair = _pair(profile, name, kind)
    if (reason := engine.refusal(pair)) is not None:
        raise UserError(f"{engine_name} {engine.version} refuses {name} as a draft of {profile.target.id}: {reason}")
    pair, conversions = engine.loadable(pair, folder)
    measured = None
    if prices is None:
        replayed = EngineReplay(trace, documents.table, prompts=prompts, draft_tokens=draft_tokens)
    else:
        measured = EnginePrices.load(prices)
        measured.check_is_of(engine_name, engine.version, profile.target, trace.header.draft, source=prices)
        replayed = MeasuredReplay(trace, documents.table, measured, prompts=prompts, draft_tokens=draft_tokens)
    candidates = engine.search(pair, replayed)
    candidates.sort(key=lambda candidate: candidate.predicted.ms_per_token)
    if (best := candidates[0].predicted.speedup) <= 1.0 and draft_tokens is None:
        gains = replayed.gains() if isinstance(replayed, MeasuredReplay) else {}
        at_once = "".join(
            f", and at {priced.predicted.speedup:.2f}x with {priced.tree.max_depth} draft tokens and {size} requests at once"
            for size, priced in gains.items()
        )
        raise UserError(
            f"{engine_name}: its best configuration with {name} is predicted at {best:.2f}x of plain decoding{at_once}; serve the target "
            "alone, choose another draft with --draft, or export a chain all the same with --draft-tokens"
        )
    variants = [_variant(engine, pair, candidate, tuned, folder) for candidate in candidates]
    result = Export(
        provenance=stamp(),
        engine=engine_name,
        engine_version=engine.version,
        profile=str(source),
        study=str(documents.folder),
        target=profile.target,
        draft=trace.header.draft,
        kind=kind,
        point=number,
        workload=profile.workload.name,
        hardware=documents.table.device,
        tuned=tuned,
        variants=variants,
        preparation=list(engine.preparation(pair, folder)),
        lossless=engine.lossless,
        notes=[
            *_caveats(documents, profile, number, trace, prompts, variants, engine.floor_note, measured),
            *_left_out(engine.vision[kind], trace),
            *(conversion.note for conversion in conversions),
            *engine.caveats(pair),
            *engine.notes,
        ],
    )
    for conversion in conversions:
        conversion.write(conversion.folder)
    for candidate, variant in zip(candidates, variants, strict=True):
        path = folder / variant.file
        write_settings(path, candidate.settings)
        read_settings(engine.settings_type, path)
        for file, content in engine.companions(candidate).items():
            write_settings(folder / file, content)
    result.save(folder / EXPORT)
    print_export(result, folder, console)
    return result


def _pair(profile: DecodingProfile, draft: str, kind: str) -> Pair:
    """The models as an engine is given them, which does not know the names of bundled models."""
    folders, target = bundled_models(), profile.target.id
    return Pair(
        str(folders.get(target, target)),
        str(folders.get(draft, draft)),
        kind,
        find_model(target),
        find_model(draft),
        profile.precision,
    )


def _engine_trace(engine: Engine, documents: SearchDocuments, profile: DecodingProfile, draft: str, kind: str) -> Trace:
    """The trace of the draft as the engine runs it and shows it images.

    Raises:
        UserError: it was not recorded.
    """
    vision = engine.vision[kind]
    if (trace := documents.engine_trace(draft, vision)) is not None:
        return trace
    shown, option = "with every visual token", ""
    if vision == "placeholders":
        shown, option = "and shows it image placeholders as text", " --visual-input placeholders"
    prompts = profile.workload
    option += "" if prompts.max_new_tokens is None else f" --max-new-tokens {prompts.max_new_tokens}"
    option += "" if prompts.temperature is None else f" --temperature {prompts.temperature:g}"
    raise UserError(
        f"{engine.name} runs the full draft {shown}; {documents.folder} has no such trace of {draft}; record it: autotune record "
        f"--target {profile.target.id} --draft {draft} --visual-keep 1{option} --workload {prompts.name} --prompts "
        f"{prompts.num_tune_prompts} -o {documents.folder}"
    )


def _served_kind(documents: SearchDocuments, profile: DecodingProfile, engine: str, draft: str) -> str:
    """The kind of a draft that the engine serves.

    Raises:
        UserError: the draft was not recorded, or the engine does not serve its kind.
    """
    methods, recorded = ENGINES[engine].methods, documents.draft_kinds
    kinds = recorded | {point.draft.id: point.draft.kind for point in profile.points if point.draft is not None}
    if served := [name for name in recorded if kinds[name] in methods]:
        advice = f"export a recorded one: --draft {' or '.join(served)}"
    else:
        advice = f"search again with a kind that it serves: {' or '.join(methods)}"
    if draft not in kinds:
        raise UserError(f"--draft {draft}: {documents.folder} has traces of {', '.join(recorded)}; {advice}")
    if kinds[draft] in UNCHECKED:
        raise UserError(
            f"{draft} is a draft of kind {kinds[draft]}, and no settings of {engine} for this kind have been checked, so that none are "
            f"exported; {advice}"
        )
    if kinds[draft] not in methods:
        raise UserError(f"{engine} cannot serve {draft}, a draft of kind {kinds[draft]}; {advice}")
    return kinds[draft]


def _variant(engine: Engine, pair: Pair, candidate: Candidate, tuned: Predicted, folder: Path) -> Variant:
    path = folder / engine.settings_file.format(variant=candidate.name)
    return Variant(
        name=candidate.name,
        label=candidate.label,
        tree=candidate.tree,
        predicted=candidate.predicted,
        slowdown=candidate.predicted.ms_per_token / tuned.ms_per_token - 1,
        by_batch=list(candidate.by_batch),
        file=path.name,
        companions=list(engine.companions(candidate)),
        settings=candidate.settings.model_dump(exclude_none=True),
        command=engine.command(pair, candidate.settings, path),
    )


def _left_out(vision: Vision, trace: Trace) -> list[str]:
    """The note on prompts with images that are not replayed."""
    num_images = int((trace.num_visual_tokens > 0).sum())
    if vision != "text" or num_images == 0:
        return []
    return [
        f"{num_images} of {trace.num_prompts} tuning prompts have an image and are left out, from the speed of the profile's point too"
    ]


def _caveats(
    documents: SearchDocuments,
    profile: DecodingProfile,
    number: int,
    trace: Trace,
    prompts: NDArray[np.bool_],
    variants: list[Variant],
    floor_note: str | None,
    measured: EnginePrices | None,
) -> list[str]:
    """Notes on the limits of the predictions, and on what engines leave out of the profile."""
    point, table = profile.points[number], documents.table
    steps = "step times estimated from a datasheet" if table.estimated else "step times measured"
    if measured is None:
        where = (
            f"{steps} in autotune's own runtime on {table.device.model}; an engine's steps take other times, and nothing was "
            "measured in it"
        )
    else:
        lengths, sizes = (", ".join(map(str, found)) for found in (measured.draft_lengths, measured.batch_sizes))
        where = (
            f"the rounds' times of {measured.engine} {measured.engine_version} on {measured.hardware.model}, measured with {lengths} draft "
            f"tokens and {sizes} requests at once; the time per token of the profile's point is of autotune's own runtime"
        )
    notes = [f"predictions replay {int(prompts.sum())} tuning prompts of {profile.workload.name} with {where}"]
    if documents.reproduces(point) is False and point.predicted is not None:
        notes.append(
            f"the documents in {documents.folder} predict {documents.predict(point, trace).speedup:.2f}x for the profile's "
            f"point, but the profile says {point.predicted.speedup:.2f}x: they have changed since, or belong to another search"
        )
    if len(profile.points) > 1:
        combined = documents.combined_speedup(profile, trace)
        requests = "all tuning prompts" if prompts.all() else "the tuning prompts that it decodes"
        notes.append(
            f"the profile has {len(profile.points)} points and an engine runs one: this is point {number}, for "
            f"{point.when.label}, replayed on {requests}"
            + (
                ""
                if combined is None
                else f"; all points together are predicted at {combined:.2f}x on all tuning prompts"
            )
        )
    if (
        point.draft is not None
        and (keep := point.draft.subnet.visual_keep) < 1.0
        and trace.num_visual_tokens[prompts].any()
    ):
        notes.append(f"the profile's point keeps {keep:g} of the visual tokens; engines do not prune them")
    if (temperature := profile.workload.temperature) is not None and temperature > 0.0:
        notes.append(
            f"the tuning prompts were sampled at temperature {temperature:g} with drafts coupled to the target's noise; engines do not "
            "couple, and accept fewer tokens than predicted"
        )
    if isinstance(point.tree, ChainPolicy) and point.tree.has_floor and floor_note is not None:
        notes.append(f"the profile's {point.tree.label} has a floor; {floor_note}, so chains are exported without one")
    if not point.lossless:
        notes.append("the profile's point is lossy; engines verify losslessly and are compared with its lossless speed")
    for variant in variants:
        if variant.by_batch and measured is None:
            notes.append(
                f"batches of 2 to {variant.by_batch[-1].end} requests were not measured: they are priced in lockstep by steps of "
                f"one request that read as many tokens, at most {table.verify.max_tokens}, without each request's own KV cache"
            )
    return notes
