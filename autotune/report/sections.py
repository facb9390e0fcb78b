"""The sections of a report: what a table says, in a sentence before it, and what is missing where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.cost.latency_table import latency_table
from autotune.cost.roofline import find_limits
from autotune.cost.table import CostTable
from autotune.documents.table import Table
from autotune.report.examples import DecodedExample
from autotune.report.sources import Sources
from autotune.report.tables import ablation_table, acceptance_tables, front_table, subnet_tables

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
        tables = profile.evidence.engine.tables()
        return [evaluation, Section("settings", "Replayed settings, prices and requests at once", ENGINE, "", tables)]
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
    """What the latencies are of, and whether a datasheet limits them."""
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
