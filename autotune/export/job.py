"""``autotune export``: the nearest configuration that a serving engine can run, chosen by replay within the engine's space."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from autotune.acceptance.trace import Trace
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile, OperatingPoint, Predicted, load_profile
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.export.choose import Choice, EngineReplay
from autotune.export.document import EXPORT, BatchPrediction, Export, Variant, print_export
from autotune.export.engine import Engine, Pair, read_settings, write_settings
from autotune.export.sglang import Sglang
from autotune.export.study import Study, find_studies
from autotune.export.tensorrt_llm import TensorRtLlm
from autotune.export.transformers import Transformers
from autotune.export.tuned import Mask, keeps_promise, points_of, promise_of, promise_together
from autotune.export.vllm import Vllm
from autotune.files import require_writable, write_document
from autotune.modeling.loading import bundled_models
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
    """Write an engine's settings for a profile, and beside them what is predicted of them. ``point``: for a server of its
    own requests alone; None: the last one, for all requests. ``draft``: another one that was recorded.

    Raises:
        UserError: the profile or its study cannot be read, no such point or draft, a draft that the engine does not serve,
            or nothing that is predicted to be faster than plain decoding.
    """
    engine, profile = ENGINES[engine_name], load_profile(source)
    folder = output or Path("exports") / engine_name
    require_writable(folder / EXPORT)
    number = _point_number(profile, source, point)
    chosen = profile.points[number]
    if draft is None and chosen.draft is None:
        raise UserError(
            f"{source}: point {number} decodes without a draft; there is nothing to export; serve the target plainly"
        )
    name = draft or (chosen.draft.id if chosen.draft else "")
    studies = find_studies(profile, source, study)
    found = next((one for one in studies if keeps_promise(one, chosen)), studies[0])
    kind = _kind(found, profile, engine_name, name)
    trace = found.whole(name)
    if trace is None:
        raise UserError(
            f"{engine_name} runs all of a draft, and shows it every visual token; {found.folder} has no such trace of {name}; "
            f"record it: autotune record --target {profile.target.id} --draft {name} --visual-keep 1 --workload "
            f"{profile.workload.name} --prompts {profile.workload.num_tune_prompts} -o {found.folder}"
        )
    prompts = None if point is None else points_of(profile, trace) == number
    if prompts is not None and not prompts.any():
        raise UserError(
            f"--point {number}: no tuning prompt meets its condition, {chosen.when.label}; leave --point out"
        )
    tuned = promise_of(found, chosen, trace, prompts)
    pair = Pair(_served_name(profile.target.id), _served_name(name), kind)
    variants = _variants(engine, pair, EngineReplay(trace, found.table, prompts=prompts), tuned, folder)
    if (best := variants[0].predicted.speedup) <= 1.0:
        raise UserError(
            f"{engine_name}: the best that it can run with {name} is predicted at {best:.2f}x of plain decoding; "
            f"serve the target plainly, or name another draft with --draft"
        )
    result = Export(
        provenance=stamp(),
        engine=engine_name,
        profile=str(source),
        study=str(found.folder),
        target=profile.target,
        draft=trace.header.draft,
        kind=kind,
        point=number,
        workload=profile.workload.name,
        hardware=found.table.device,
        tuned=tuned,
        variants=variants,
        lossless=engine.lossless,
        notes=[*_caveats(found, profile, number, trace, prompts), *_of_batches(variants, found), *engine.notes],
    )
    for variant in variants:
        path = folder / variant.file
        write_settings(path, engine.settings_kind.model_validate(variant.settings))
        read_settings(engine.settings_kind, path)
    write_document(folder / EXPORT, "export", result)
    print_export(result, folder, console)
    return result


def _point_number(profile: DecodingProfile, source: Path, point: int | None) -> int:
    last = len(profile.points) - 1
    if point is not None and not 0 <= point <= last:
        raise UserError(
            f"--point {point}: {source} has points 0 to {last}; name one of them, or leave it out for the last"
        )
    return last if point is None else point


def _kind(study: Study, profile: DecodingProfile, engine: str, draft: str) -> str:
    """Of a draft that the engine serves.

    Raises:
        UserError: it does not serve it, or nothing is known of it.
    """
    methods = ENGINES[engine].methods
    kinds = study.drafts | {point.draft.id: point.draft.kind for point in profile.points if point.draft is not None}
    served = [name for name in study.drafts if kinds[name] in methods]
    instead = f"search again with one of a kind that it serves: {' or '.join(methods)}"
    if served:
        instead = f"export one that was recorded: --draft {' or '.join(served)}"
    if draft not in kinds:
        raise UserError(f"--draft {draft}: {study.folder} has traces of {', '.join(study.drafts)}; {instead}")
    if kinds[draft] not in methods:
        raise UserError(f"{engine} cannot serve the kind of draft that {draft} is, {kinds[draft]}; {instead}")
    return kinds[draft]


def _served_name(model: str) -> str:
    """As the profile names it; a bundled model by the folder where it lies, for engines know no bundled names."""
    return str(bundled_models().get(model, model))


def _variants(engine: Engine, pair: Pair, replay: EngineReplay, tuned: Predicted, folder: Path) -> list[Variant]:
    """The fastest chain and, if the engine grows any, the fastest tree; the faster one first."""
    found: dict[str, Choice | None] = {
        "chain": replay.fastest(replay.chains()),
        "tree": replay.fastest(tree for tree in replay.trees() if engine.grows(pair, tree)),
    }
    choices = sorted(((c, name) for name, c in found.items() if c is not None), key=lambda one: one[0].rank)
    return [_variant(engine, pair, replay, choice, name, tuned, folder) for choice, name in choices]


def _variant(
    engine: Engine, pair: Pair, replay: EngineReplay, choice: Choice, name: str, tuned: Predicted, folder: Path
) -> Variant:
    schedule = []
    if engine.has_schedule and isinstance(choice.tree, ChainPolicy):
        schedule = replay.schedule(choice.tree)
    settings = engine.settings(pair, choice.tree, schedule)
    path = folder / engine.file_name(name)
    return Variant(
        name=name,
        tree=choice.tree,
        predicted=Predicted(
            speedup=choice.speedup,
            ms_per_token=choice.ms_per_token,
            tokens_per_round=choice.tokens_per_round,
            estimated=tuned.estimated,
        ),
        slowdown=choice.ms_per_token / tuned.ms_per_token - 1,
        by_batch=[BatchPrediction(**asdict(one), estimated=tuned.estimated or one.end > 1) for one in schedule],
        file=path.name,
        settings=settings.model_dump(exclude_none=True),
        command=engine.command(pair, settings, path),
    )


def _caveats(study: Study, profile: DecodingProfile, number: int, trace: Trace, prompts: Mask | None) -> list[str]:
    """What predictions leave out, and what of the profile no engine runs."""
    point, table = profile.points[number], study.table
    steps = "a datasheet's estimate of steps" if table.estimated else "steps measured"
    said = [
        f"predictions replay {trace.num_prompts if prompts is None else int(prompts.sum())} tuning prompts of "
        f"{profile.workload.name}, priced by {steps} through autotune's own runner on {table.device.model}; an engine's steps "
        f"cost otherwise, and nothing was measured in it"
    ]
    if keeps_promise(study, point) is False and point.predicted is not None:
        again = promise_of(study, point, trace).speedup
        said.append(
            f"the documents in {study.folder} predict {again:.2f}x of the profile's point, other than the profile says, "
            f"{point.predicted.speedup:.2f}x: they were made anew since, or are another search's"
        )
    if len(profile.points) > 1:
        together = promise_together(study, profile, trace)
        requests = "all tuning prompts" if prompts is None else "the tuning prompts that get it"
        said.append(
            f"the profile has {len(profile.points)} points, an engine runs one: this is point {number}, for {point.when.label}, "
            f"replayed on {requests}"
            + ("" if together is None else f"; together they are predicted at {together:.2f}x")
        )
    said += _left_out(point, trace)
    return said


def _of_batches(variants: list[Variant], study: Study) -> list[str]:
    """How far a schedule by batch size goes, and on what ground."""
    return [
        f"beyond one request nothing was measured: batches of up to {variant.by_batch[-1].end} requests in step are priced by steps of one "
        f"request that read as many tokens, at most {study.table.verify.max_tokens}, without each request's own cache"
        for variant in variants
        if variant.by_batch
    ]


def _left_out(point: OperatingPoint, trace: Trace) -> list[str]:
    """What of a point no engine does."""
    said = []
    if point.draft is not None and point.draft.subnet.visual_keep < 1.0 and trace.num_visual_tokens.any():
        keep = point.draft.subnet.visual_keep
        said.append(f"the profile's point keeps {keep:g} of the visual tokens; engines show a draft all of them")
    if not point.lossless:
        said.append("the profile's point is lossy; engines verify losslessly, and are compared with its lossless speed")
    return said
