"""``autotune export``: the configuration of a serving engine nearest to a profile, found by replay in the engine's
space.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.acceptance.trace import Trace
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile, Predicted
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.export import vllm
from autotune.export.document import EXPORT, Export, print_export
from autotune.export.model_files import find_model
from autotune.export.search_documents import SearchDocuments, find_search_documents, priced_chains
from autotune.export.vllm import NAME, SERVED, Pair
from autotune.files import require_writable, write_bytes
from autotune.modeling.gguf import PACKAGED, SUFFIX
from autotune.modeling.loading import bundled_models, resolve
from autotune.trees.chain import ChainPolicy

GGUF_NOTE = "predictions are of its dequantized weights; an engine that keeps them quantized may choose other tokens"


@dataclass(frozen=True)
class Selection:
    """The last operating point of a profile, for all requests, with a draft for one engine and the documents of its
    search.
    """

    profile: DecodingProfile
    documents: SearchDocuments
    kind: str
    """The draft's kind."""
    trace: Trace
    """The trace of the full draft as the engine shows it images."""


def select_for_export(source: Path, *, study: Path | None = None, draft: str | None = None) -> Selection:
    """Choose the draft of an export; see ``export_profile`` for the arguments.

    Raises:
        UserError: the profile or its study cannot be read, there is no such draft, the engine does not serve the draft,
            or the draft was not recorded as the engine shows it images.
    """
    profile = DecodingProfile.load(source)
    point = profile.point
    if draft is None:
        if point.draft is None:
            raise UserError(f"{source}: decodes without a draft, so there is nothing to export; serve the target alone")
        draft = point.draft.id
    found = find_search_documents(profile, source, study)
    documents = next((candidate for candidate in found if candidate.reproduces(point)), found[0])
    kind = _served_kind(documents, profile, draft)
    return Selection(profile, documents, kind, _engine_trace(documents, profile, draft, kind))


def _served_kind(documents: SearchDocuments, profile: DecodingProfile, draft: str) -> str:
    """The kind of a draft that was recorded and that the engine serves."""
    recorded = {one.draft.id: one.draft_kind for one in documents.headers.values()}
    kinds = recorded | {point.draft.id: point.draft.kind for point in profile.points if point.draft is not None}
    if served := [name for name in recorded if kinds[name] in SERVED]:
        advice = f"export a recorded one: --draft {' or '.join(served)}"
    else:
        advice = f"search again with a kind that it serves: {' or '.join(SERVED)}"
    if draft not in kinds:
        raise UserError(f"--draft {draft}: {documents.folder} has traces of {', '.join(recorded)}; {advice}")
    if kinds[draft] not in SERVED:
        raise UserError(f"{NAME} cannot serve {draft}, a draft of kind {kinds[draft]}; {advice}")
    return kinds[draft]


def _engine_trace(documents: SearchDocuments, profile: DecodingProfile, draft: str, kind: str) -> Trace:
    """The trace of the draft as the engine runs it and shows it images."""
    vision = SERVED[kind].images
    if (trace := documents.engine_trace(draft, vision)) is not None:
        return trace
    shown, option = "with every visual token", ""
    if vision == "placeholders":
        shown, option = "and shows it image placeholders as text", " --visual-input placeholders"
    prompts = profile.workload
    option += "" if prompts.max_new_tokens is None else f" --max-new-tokens {prompts.max_new_tokens}"
    option += "" if prompts.temperature is None else f" --temperature {prompts.temperature:g}"
    raise UserError(
        f"{NAME} runs the full draft {shown}; {documents.folder} has no such trace of {draft}; record it: autotune record "
        f"--target {profile.target.id} --draft {draft} --visual-keep 1{option} --workload {prompts.name} --prompts "
        f"{prompts.num_tune_prompts} -o {documents.folder}"
    )


def export_profile(
    source: Path,
    console: Console,
    *,
    study: Path | None = None,
    draft: str | None = None,
    draft_tokens: int | None = None,
    output: Path | None = None,
) -> Export:
    """Write an engine's settings for a profile, and a document with their predictions.

    Args:
        study: folder of the search; None: found next to the profile.
        draft: another recorded draft instead of the point's.
        draft_tokens: the length of the chain to export, however fast it is predicted to be; None: the fastest.
        output: folder to write; None: ``exports/vllm``.

    Raises:
        UserError: see ``select_for_export``; vLLM refuses the models, the trace holds no chain of
            ``draft_tokens``, or nothing is predicted to be faster than plain decoding.
    """
    folder = output or Path("exports") / NAME
    require_writable(folder / EXPORT)
    selected = select_for_export(source, study=study, draft=draft)
    pair, conversions = vllm.loadable(_pair(selected), folder)
    chains = priced_chains(selected.trace, selected.documents.table)
    depth = _fastest(chains, selected.trace.header.draft.id) if draft_tokens is None else draft_tokens
    if depth not in chains:
        raise UserError(
            f"--draft-tokens {depth}: the trace of {selected.trace.header.draft.id} and the cost table hold chains of 1 to {max(chains)} "
            "tokens; give one of them"
        )
    tuned = selected.documents.predict(selected.profile.point, selected.trace)
    settings, path = vllm.settings(pair, depth), folder / vllm.SETTINGS_FILE
    result = Export(
        provenance=stamp(),
        engine=NAME,
        engine_version=vllm.VERSION,
        profile=str(source),
        study=str(selected.documents.folder),
        target=selected.profile.target,
        draft=selected.trace.header.draft,
        kind=selected.kind,
        workload=selected.profile.workload.name,
        hardware=selected.documents.table.device,
        tuned=tuned,
        tree=ChainPolicy(depth=depth),
        predicted=chains[depth],
        slowdown=chains[depth].ms_per_token / tuned.ms_per_token - 1,
        file=path.name,
        settings=settings,
        command=vllm.command(pair, settings),
        lossless=vllm.LOSSLESS,
        notes=[
            _prediction_note(selected),
            *_profile_notes(selected),
            *(conversion.note for conversion in conversions),
            *(f"{name}: {GGUF_NOTE}" for name in (pair.target, pair.draft) if name.endswith(SUFFIX)),
            *vllm.caveats(pair),
            vllm.NOTE,
        ],
    )
    for conversion in conversions:
        conversion.write()
    write_bytes(path, (json.dumps(result.settings, indent=1) + "\n").encode())
    result.save(folder / EXPORT)
    print_export(result, folder, console)
    return result


def _pair(selected: Selection) -> Pair:
    """The models as an engine is given them, which does not know the names of bundled models."""
    folders, target, draft = bundled_models(), selected.profile.target.id, selected.trace.header.draft.id
    path = lambda name: resolve(name) if name in PACKAGED else str(folders.get(name, name))  # noqa: E731
    pair = Pair(path(target), path(draft), selected.kind, find_model(target), find_model(draft), selected.profile.dtype)
    if (reason := vllm.pair_refusal(pair)) is not None:
        raise UserError(f"{NAME} {vllm.VERSION} refuses {draft} as a draft of {target}: {reason}")
    return pair


def _fastest(chains: Mapping[int, Predicted], draft: str) -> int:
    """The depth of the fastest chain, of equal ones the shortest; refused where plain decoding is faster."""
    depth = min(chains, key=lambda depth: chains[depth].ms_per_token)
    if (best := chains[depth].speedup) > 1.0:
        return depth
    raise UserError(
        f"{NAME}: its best configuration with {draft} is predicted at {best:.2f}x of plain decoding; serve the target alone, choose "
        "another draft with --draft, or export a chain all the same with --draft-tokens"
    )


def _prediction_note(selected: Selection) -> str:
    table = selected.documents.table
    steps = "step times estimated from a datasheet" if table.estimated else "step times measured"
    return (
        f"predictions replay {selected.trace.num_prompts} tuning prompts of {selected.profile.workload.name} with {steps} in autotune's "
        f"own runtime on {table.device.model}; an engine's steps take other times, and nothing was measured in it"
    )


def _profile_notes(selected: Selection) -> Iterator[str]:
    """Notes on what the engine leaves out of the profile."""
    profile, point, documents = selected.profile, selected.profile.point, selected.documents
    if documents.reproduces(point) is False and point.predicted is not None:
        yield (
            f"the documents in {documents.folder} predict {documents.predict(point, selected.trace).speedup:.2f}x for the profile's "
            f"point, but the profile says {point.predicted.speedup:.2f}x: they have changed since, or belong to another search"
        )
    if len(profile.points) > 1:
        yield f"the profile has {len(profile.points)} points and an engine runs one: this is the last, replayed on all tuning prompts"
    keep = point.draft.subnet.visual_keep if point.draft is not None else 1.0
    if keep < 1.0 and selected.trace.num_visual_tokens.any():
        yield f"the profile's point keeps {keep:g} of the visual tokens; engines do not prune them"
    if temperature := profile.workload.temperature:
        yield (
            f"the tuning prompts were sampled at temperature {temperature:g} with drafts coupled to the target's noise; engines do not "
            "couple, and accept fewer tokens than predicted"
        )
    if isinstance(point.tree, ChainPolicy) and point.tree.has_floor:
        yield f"the profile's {point.tree.label} has a floor; the engine has no such setting, so chains are exported without one"
    if not point.lossless:
        yield "the profile's point is lossy; engines verify losslessly and are compared with its lossless speed"
