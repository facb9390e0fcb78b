"""``autotune export``: the configuration of a serving engine nearest to a profile, found by replay in the engine's space."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from autotune.acceptance.trace import Trace
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile, Predicted
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.export.document import EXPORT, Export, Variant, print_export
from autotune.export.engine import Engine, Pair, read_settings, write_settings
from autotune.export.engine_replay import EngineReplay, PricedTree
from autotune.export.search_documents import SearchDocuments, find_search_documents
from autotune.export.sglang import Sglang
from autotune.export.tensorrt_llm import TensorRtLlm
from autotune.export.transformers import Transformers
from autotune.export.vllm import Vllm
from autotune.files import require_writable
from autotune.modeling.loading import bundled_models
from autotune.study.folder import points_of_bands
from autotune.trees.chain import ChainPolicy

ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "tensorrt-llm": TensorRtLlm(),
    "transformers": Transformers(),
}


def export_profile(
    source: Path,
    engine_name: str,
    console: Console,
    *,
    study: Path | None = None,
    point: int | None = None,
    draft: str | None = None,
    output: Path | None = None,
) -> Export:
    """Write an engine's settings for a profile, and a document with their predictions beside them.

    ``point`` exports one point, for a server of its requests only; None: the last point, for all requests. ``draft``
    exports another recorded draft in place of the point's.

    Raises:
        UserError: the profile or its study cannot be read, there is no such point or draft, the engine does not serve the
            draft, or nothing is predicted to be faster than plain decoding.
    """
    engine, profile = ENGINES[engine_name], DecodingProfile.load(source)
    folder = output or Path("exports") / engine_name
    require_writable(folder / EXPORT)
    last = len(profile.points) - 1
    number = last if point is None else point
    if not 0 <= number <= last:
        raise UserError(f"--point {point}: {source} has points 0 to {last}; give one of them, or leave --point out")
    selected = profile.points[number]
    if draft is None and selected.draft is None:
        raise UserError(
            f"{source}: point {number} decodes without a draft, so there is nothing to export; serve the target alone"
        )
    name = draft or (selected.draft.id if selected.draft else "")
    found = find_search_documents(profile, source, study)
    documents = next((candidate for candidate in found if candidate.reproduces(selected)), found[0])
    kind = _served_kind(documents, profile, engine_name, name)
    trace = documents.full_draft_trace(name)
    if trace is None:
        raise UserError(
            f"{engine_name} runs the full draft with every visual token; {documents.folder} has no such trace of {name}; "
            f"record it: autotune record --target {profile.target.id} --draft {name} --visual-keep 1 --workload "
            f"{profile.workload.name} --prompts {profile.workload.num_tune_prompts} -o {documents.folder}"
        )
    prompts = None if point is None else points_of_bands(profile, trace).has_rounds(number)
    if prompts is not None and not prompts.any():
        raise UserError(
            f"--point {number}: no tuning prompt meets its condition, {selected.when.label}; leave --point out"
        )
    tuned = documents.predict(selected, trace, prompts)
    folders = bundled_models()  # engines do not know bundled names
    pair = Pair(str(folders.get(profile.target.id, profile.target.id)), str(folders.get(name, name)), kind)
    replay = EngineReplay(trace, documents.table, prompts=prompts)
    trees = (tree for tree in replay.trees() if engine.supports_tree(pair, tree))
    fastest = {"chain": replay.fastest(replay.chains()), "tree": replay.fastest(trees)}
    ranked = sorted(((priced, name) for name, priced in fastest.items() if priced), key=lambda item: item[0].rank)
    if (best := ranked[0][0].predicted.speedup) <= 1.0:
        raise UserError(
            f"{engine_name}: its best configuration with {name} is predicted at {best:.2f}x of plain decoding; serve the target "
            "alone, or choose another draft with --draft"
        )
    variants = [_variant(engine, pair, replay, priced, name, tuned, folder) for priced, name in ranked]
    result = Export(
        provenance=stamp(),
        engine=engine_name,
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
        lossless=engine.lossless,
        notes=[*_caveats(documents, profile, number, trace, prompts, variants, engine.floor_note), *engine.notes],
    )
    for variant in variants:
        path = folder / variant.file
        write_settings(path, engine.settings_type.model_validate(variant.settings))
        read_settings(engine.settings_type, path)
    result.save(folder / EXPORT)
    print_export(result, folder, console)
    return result


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
    if kinds[draft] not in methods:
        raise UserError(f"{engine} cannot serve {draft}, a draft of kind {kinds[draft]}; {advice}")
    return kinds[draft]


def _variant(
    engine: Engine, pair: Pair, replay: EngineReplay, priced: PricedTree, name: str, tuned: Predicted, folder: Path
) -> Variant:
    tree = priced.tree
    schedule = replay.schedule(tree) if engine.has_schedule and isinstance(tree, ChainPolicy) else []
    settings = engine.settings(pair, tree, schedule)
    path = folder / engine.settings_file.format(variant=name)
    return Variant(
        name=name,
        tree=tree,
        predicted=priced.predicted,
        slowdown=priced.predicted.ms_per_token / tuned.ms_per_token - 1,
        by_batch=schedule,
        file=path.name,
        settings=settings.model_dump(exclude_none=True),
        command=engine.command(pair, settings, path),
    )


def _caveats(
    documents: SearchDocuments,
    profile: DecodingProfile,
    number: int,
    trace: Trace,
    prompts: np.ndarray | None,
    variants: list[Variant],
    floor_note: str,
) -> list[str]:
    """Notes on the limits of the predictions, and on what engines leave out of the profile."""
    point, table = profile.points[number], documents.table
    steps = "step times estimated from a datasheet" if table.estimated else "step times measured"
    notes = [
        f"predictions replay {trace.num_prompts if prompts is None else int(prompts.sum())} tuning prompts of "
        f"{profile.workload.name} with {steps} in autotune's own runtime on {table.device.model}; an engine's steps take other "
        "times, and nothing was measured in it"
    ]
    if documents.reproduces(point) is False and point.predicted is not None:
        notes.append(
            f"the documents in {documents.folder} predict {documents.predict(point, trace).speedup:.2f}x for the profile's "
            f"point, but the profile says {point.predicted.speedup:.2f}x: they have changed since, or belong to another search"
        )
    if len(profile.points) > 1:
        combined = documents.combined_speedup(profile, trace)
        requests = "all tuning prompts" if prompts is None else "the tuning prompts that it decodes"
        notes.append(
            f"the profile has {len(profile.points)} points and an engine runs one: this is point {number}, for "
            f"{point.when.label}, replayed on {requests}"
            + ("" if combined is None else f"; all points together are predicted at {combined:.2f}x")
        )
    if point.draft is not None and (keep := point.draft.subnet.visual_keep) < 1.0 and trace.num_visual_tokens.any():
        notes.append(f"the profile's point keeps {keep:g} of the visual tokens; engines show the draft all of them")
    if isinstance(point.tree, ChainPolicy) and point.tree.has_floor:
        notes.append(f"the profile's {point.tree.label} has a floor; {floor_note}, so chains are exported without one")
    if not point.lossless:
        notes.append("the profile's point is lossy; engines verify losslessly and are compared with its lossless speed")
    for variant in variants:
        if variant.by_batch:
            notes.append(
                f"batches of 2 to {variant.by_batch[-1].end} requests were not measured: they are priced in lockstep by steps of "
                f"one request that read as many tokens, at most {table.verify.max_tokens}, without each request's own KV cache"
            )
    return notes
