"""``autotune report``: one HTML page that explains a decoding profile by the documents of its search. It opens offline:
style and images are inline, and there is no script.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.console import Console
from autotune.cost.latency_table import latency_table
from autotune.cost.roofline import find_limits
from autotune.cost.table import CostTable
from autotune.documents.answer import answer_of
from autotune.documents.loads import LoadResult, loads_table
from autotune.documents.provenance import stamp
from autotune.files import write_bytes
from autotune.report.examples import DecodedExample, TokenTexts, decoded_example, find_prompts, visible
from autotune.report.sources import Sources, find_sources
from autotune.report.tables import (
    ablation_table,
    acceptance_tables,
    decoding_table,
    front_table,
    provenance_tables,
    subnet_tables,
)
from autotune.study.outputs import require_replaceable
from autotune.table import Table

FEW_PROMPTS = 8  # a bootstrap interval from fewer prompts says little about others


EVALUATION = (
    "All arms decoded the same held-out prompts in one run, interleaved in random order. Speedups are ratios of decoding "
    "time, the draft's prefill included; intervals are paired bootstraps over prompts. Published defaults that were "
    "significantly slower than the best one left early. Where backends raced, only backends with the target's own weights "
    "are deployed, unless the search was given --any-weights; agreement is the mean share of an answer before its first "
    "token that differs."
)
PREDICTIONS = (
    "Replay predicts the rounds exactly. Their cost may deviate, because the device may run faster or slower than when its "
    "cost table was measured; speedups are ratios and deviate less. Finalists that are significantly slower than the "
    "fastest arm were eliminated early, and defaults that are slower than the fastest default."
)
FRONT = (
    "Predicted by replay over all tuning prompts: no configuration beats these in both speed and tree size. Smaller trees "
    "leave more of an accelerator to other requests and lose less if verification costs more than measured."
)
ABLATION = (
    "All values are predicted. Dimensions of the subnet are compared by the best chains on the prompts of the screening. A "
    "best result on the prompts that selected it is slightly optimistic."
)
ACCEPTANCE = (
    "The share of offered tokens that the target accepted. A depth is offered in rounds that accepted all depths above it; "
    "a rank (1 is the draft's most probable token) is offered below accepted nodes that have a child of that rank."
)
TREE = (
    "The tree is replayed from the trace and equals the runtime's tree. The shown round is the one in which the tree helped "
    "most compared with a chain. Ticked nodes (✓) were accepted, the first one is the last token before the round, and "
    "percentages are the draft's probabilities. Spaces are shown as ·, line breaks as ⏎."
)
ENGINE = (
    "Speedups over no speculation by replay of the recorded answers and the prices, pooled over the tuning prompts, with "
    "bootstrap intervals over prompts. Prices are medians of a pass over so many tokens, in one server."
)

LOADS = (
    "Clients that each send their next request when the last one ended. TTFT is the mean time to the first token, and "
    "TPOT that of each token after it. Intervals are bootstraps over requests."
)
NO_LOADS = "One request at a time: the search was not given --load."


def write_report(
    given: Path,
    output: Path,
    console: Console,
    *,
    study: str | None = None,
    storage: str | None = None,
    workload: str | None = None,
) -> None:
    require_replaceable(output, "-o")
    sources = find_sources(given, study=study, storage=storage)
    if sources.folder not in (None, given):
        console.say(f"{given}: study in {sources.folder}")
    elif sources.folder is None and not sources.is_of_engine:
        console.say(
            f"{given}: no study found next to it; the page shows the profile alone (give the study with --study)"
        )
    page = render(sources, workload=workload).encode()
    write_bytes(output, page)
    console.say(f"report written to {output} ({len(page) / 1e6:.1f} MB)")


def render(sources: Sources, *, workload: str | None = None) -> str:
    """The page as HTML. Names and texts of models, prompts and devices are untrusted: all of them are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    profile, path, study = sources.profile, sources.profile_path, sources.study
    tokens = TokenTexts(sources.target.id if sources.target and sources.traces else "")
    example = decoded_example(sources, find_prompts(sources, workload), tokens)
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True
    templates.filters["visible"] = visible
    commands = [study.command] if study else []
    if path is not None:
        commands += [shlex.join(["autotune", verb, str(path)]) for verb in ("run", "serve", "bench", "check", "report")]
    return templates.get_template("page.html").render(
        sources=sources,
        profile=profile,
        notes=[*sources.notes, *_notes(sources)],
        answer=answer_of(profile, path) if profile and path else [],
        is_estimated=sources.table.estimated if sources.table else False,
        decoding=decoding_table(profile) if profile else None,
        sections=sections_of(sources, example),
        has_tokenizer=example is None or tokens.tokenizer is not None,
        provenance=provenance_tables(sources),
        commands=commands,
        made=stamp(),
    )


def _notes(sources: Sources) -> list[str]:
    """Sentences that a reader of the figures needs to know before them."""
    if sources.profile is None:
        return ["The study has no profile, because its search has not finished. The same command resumes it."]
    evidence, measured = sources.profile.evidence, sources.profile.point.measured
    notes = [f"Recorded answers: {evidence.degenerate}."] if evidence.degenerate else []
    if measured is not None and measured.num_prompts < FEW_PROMPTS:
        notes.append(
            f"Measured on {measured.num_prompts} prompts only: the interval describes these and may not cover others."
        )
    return notes


@dataclass(frozen=True)
class Section:
    """Tables under a heading, of which those without rows are not shown."""

    id: str
    heading: str
    text: str
    missing: str
    """Said in place of the text where there is nothing to show."""
    tables: Sequence[Table]
    example: DecodedExample | None = None
    loads: Sequence[LoadResult] = ()
    """Are plotted."""


def sections_of(sources: Sources, example: DecodedExample | None) -> list[Section]:
    """The sections between the profile and the provenance: those of an engine, or of a study."""
    profile, study, prices = sources.profile, sources.study, sources.table
    evaluation = Section(
        "evaluation",
        "Evaluation against plain decoding and published defaults",
        EVALUATION,
        "Nothing was measured: autotune search on the device itself evaluates its winner.",
        profile.tables() if profile else [],
    )
    if profile is not None and profile.evidence.engine is not None:
        engine = profile.evidence.engine
        loads = Section("loads", "Requests at once", LOADS, NO_LOADS, [loads_table(engine.loads)], loads=engine.loads)
        return [evaluation, loads, Section("settings", "Replayed settings and prices", ENGINE, "", engine.tables())]
    return [
        evaluation,
        Section(
            "predictions",
            "Predicted and measured speedups",
            PREDICTIONS,
            "No configuration was both predicted and measured.",
            study.tables() if study else [],
        ),
        Section(
            "fronts", "Trade-offs", FRONT, "There are no records of a tree search.", [front_table(sources.candidates)]
        ),
        Section(
            "ablation",
            "Ablation of the search dimensions",
            ABLATION,
            "No dimension of a subnet was searched.",
            [ablation_table(sources)],
        ),
        Section(
            "acceptance",
            "Acceptance by depth and rank",
            ACCEPTANCE,
            "There are no traces and no runs of the profile's draft.",
            acceptance_tables(sources),
        ),
        Section("trees", "Example tree", TREE, "There are no traces of the profile's draft.", [], example),
        Section(
            "costs",
            "Step costs",
            _costs(prices) if prices else "",
            "There is no cost table.",
            [latency_table(prices)] if prices else [],
        ),
        Section(
            "subnets",
            "Screened subnets",
            "Predicted speedup of the best chain of every subnet.",
            "No subnets were screened: the search space has so few that the tree search covers all of them.",
            subnet_tables(sources.screened),
        ),
    ]


def _costs(table: CostTable) -> str:
    """The device and precision of the latencies, and whether a datasheet limits them."""
    text = f"{table.device.model}, {table.precision}, mode {table.mode}."
    limits = find_limits(table.device.name)
    if table.estimated:
        return f"{text} The cost table is estimated from the datasheet, so there is no limit to compare it with."
    if limits is None:
        return f"{text} There is no datasheet of this device, so no limit is shown."
    return (
        f"{text} The limit is the roofline of the datasheet ({limits.source}): the longer of memory traffic at "
        f"{limits.memory_gb_per_second:.0f} GB/s and operations at the peak of this precision."
    )
