"""``autotune report``: one HTML page that explains a decoding profile by the documents of its search. It opens offline:
style and images are inline, and there is no script.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from autotune.console import Console
from autotune.documents.answer import answer_of
from autotune.documents.provenance import stamp
from autotune.files import write_bytes
from autotune.report.examples import decoded_example, visible
from autotune.report.prompts import TokenTexts, find_prompts
from autotune.report.sections import sections_of
from autotune.report.sources import Sources, find_sources
from autotune.report.tables import decoding_table, provenance_tables
from autotune.study.outputs import require_replaceable

FEW_PROMPTS = 8  # a bootstrap interval from fewer prompts says little about others


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
    tokens = TokenTexts(sources.target.id if sources.target else "")
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
        has_tokenizer=tokens.has_tokenizer,
        provenance=provenance_tables(sources),
        commands=commands,
        made=stamp(),
    )


def _notes(sources: Sources) -> list[str]:
    """What a reader of the figures needs to know before them."""
    if sources.profile is None:
        return ["The study has no profile, because its search has not finished. The same command resumes it."]
    evidence, measured = sources.profile.evidence, sources.profile.point.measured
    notes = [f"Recorded answers: {evidence.degenerate}."] if evidence.degenerate else []
    if measured is not None and measured.num_prompts < FEW_PROMPTS:
        text = (
            f"Measured on {measured.num_prompts} prompts only: the interval describes these and may not cover others."
        )
        notes.append(text)
    return notes
