"""``autotune search``: from models and prompts to a decoding profile. Every stage stores what the next run can
reuse.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.files import content_key, write_table
from autotune.machine.contention_monitor import ContentionMonitor, wait_until_idle
from autotune.replay.evaluator import Evaluator
from autotune.search.finalists import Races, measure_finalists
from autotune.search.held_out import evaluate_held_out
from autotune.search.plan import Plan, plan_search
from autotune.search.prices import price, save_table
from autotune.search.profile import measured_profile, predicted_profile
from autotune.search.screening import screen
from autotune.search.traces import record
from autotune.search.tree_search import TreeSearchResult, tune_trees
from autotune.search.tuning import Tuning
from autotune.search.tuning_prompts import TuningPrompts
from autotune.study.document import StudyDocument, StudyDraft
from autotune.study.frames import Study
from autotune.study.ledger import Ledger
from autotune.study.search_settings import SearchSettings, check_settings
from autotune.trees.policy import compile_steps


def search(settings: SearchSettings, console: Console) -> DecodingProfile:
    """Search a decoding profile, and write it. An interrupted search resumes; searches with one ``storage`` share the
    work.

    The budget begins when the models are loaded.
    """
    settings = check_settings(settings)
    tuning = begin(settings, console)
    plan = plan_search(tuning)
    study = StudyFile(tuning)
    with study.stage("cost table") as content:
        table = price(tuning, plan)
        content |= described(tuning, table)
    variants = tuning.variants
    if len(variants) > tuning.space.survivors:
        with study.stage("screening"), tuning.turn("screening"):
            variants = screen(tuning, table).survivors
    with study.stage("traces") as content, tuning.turn("traces"):
        traces = record(tuning, plan, variants)
        content |= {"tune_sha256": tuning.tune.sha256, "traces": [trace.header.file for trace in traces]}
    prompts = TuningPrompts.of(tuning.tune, Evaluator(traces, table, jobs=settings.jobs))
    with study.stage("tree search") as content, tuning.turn("tree search"):
        trees = tune_trees(tuning, prompts)
        content["optuna_study"] = trees.optuna_study
    with study.stage("finalists and evaluation") as content:
        profile = choose_profile(tuning, plan, prompts, trees, content)
        content["profile"] = profile.content_hash
    assert settings.output is not None, "the check has chosen one"
    for path in (tuning.folder / f"profile-{tuning.key}.json", settings.output):
        profile.save(path)
    if settings.table is not None:
        write_table(settings.table, Study(tuning.folder, storage=settings.storage).trials_dataframe())
    seconds = (f"{name} {seconds:.0f} s" for name, seconds in study.stage_seconds.items())
    console.say(f"time: {', '.join(seconds)}")
    console.say(f"decoding profile written to {settings.output}")
    return profile


def begin(settings: SearchSettings, console: Console) -> Tuning:
    """Load the models, wait as the settings say, before anything is timed on this device, and begin the budget."""
    # A storage that does not answer is known before models are loaded.
    with nullcontext() if settings.storage is None else Ledger(settings.storage).turn("models", console.say):
        began, thread = time.monotonic(), ThreadPoolExecutor(1)
        compiled = thread.submit(compile_steps)
        thread.shutdown(wait=False)  # an error of a model is not kept waiting
        tuning = Tuning.load(settings, console)
        compiled.result()
    loading_s = time.monotonic() - began
    console.say(f"target {settings.target}, draft {', '.join(tuning.pool.references)}, workload {settings.workload}")
    console.say(f"study in {tuning.folder}")
    if settings.wait_until_idle_s is not None and tuning.device is not None:
        wait_until_idle(settings.wait_until_idle_s, tuning.device, console)
    tuning.clock.start()
    console.say(f"models loaded in {loading_s:.0f} s; the budget of {settings.budget_s:g} s begins now")
    return tuning


def choose_profile(
    tuning: Tuning, plan: Plan, prompts: TuningPrompts, trees: TreeSearchResult, content: dict[str, Any]
) -> DecodingProfile:
    """Predict the profile for another device, or measure it on this one; of several workers, one measures for all.

    Args:
        content: gets the results of the finalists.
    """
    if tuning.device is None:
        return predicted_profile(tuning, plan, prompts, trees)

    def measure() -> DecodingProfile:
        monitor = ContentionMonitor(str(tuning.pool.target.device))
        races = Races.of(tuning, prompts.full.table)
        finalists = measure_finalists(tuning, plan, prompts, trees, races)
        evaluation = evaluate_held_out(tuning, plan, finalists, races)
        contention = monitor.contention()
        tuning.console.say(contention.describe("while configurations were run"))
        updated = finalists.prompts.full.table
        save_table(updated, tuning.folder)
        results = {"finalists": finalists.finalists, "defaults": finalists.defaults}
        content.update(results, cost_table=updated.content_hash)
        return measured_profile(tuning, plan, trees, finalists, evaluation, contention)

    settings = tuning.settings
    if settings.storage is None:
        return measure()
    held_out = tuning.pool.answer_keys.of_workload(tuning.held_out)
    documents = [trees.fastest[0].key, held_out, settings.budget_s, settings.seed, prompts.full.table.content_hash]
    key = content_key(["profile", *documents])
    record = tuning.timed("profile", key, lambda: measure().model_dump(mode="json"))
    profile = DecodingProfile.model_validate(record, strict=False)
    if "finalists" not in content:  # another worker has measured it, and shown its tables
        for table in profile.tables():
            tuning.console.show(table)
    return profile


class StudyFile:
    """Collects the fields of a study document; those of the search itself come with the cost table."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.content: dict[str, Any] = {}
        self.stage_seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a stage, and save the study after it. Yields the content, to which the stage adds its results."""
        started = time.monotonic()
        yield self.content
        self.stage_seconds[name] = time.monotonic() - started
        path = self.tuning.folder / f"study-{self.tuning.key}.json"
        is_of_ended = path.exists() and '"profile": ""' not in path.read_text()
        if "profile" in self.content or not is_of_ended:  # which is kept until this run ends, too
            records = self.tuning.ledger.used_keys
            StudyDocument(**self.content, records=records, stage_seconds=self.stage_seconds).save(path)


def described(tuning: Tuning, table: CostTable) -> dict[str, Any]:
    """The fields of a study document that say what is searched."""
    pool = tuning.pool
    return {
        "provenance": stamp(settings_key=tuning.settings.key),
        "command": tuning.settings.model_copy(update={"drafts": tuple(pool.references)}).command,
        "target": pool.target_reference,
        "target_shape": pool.target.shape,
        "drafts": [
            StudyDraft(kind=pool.drafts[id].kind, reference=known, shape=pool.draft(id).shape)
            for id, known in pool.references.items()
        ],
        "hardware": table.device,
        "workload": tuning.settings.workload,
        "tune_sha256": tuning.tune.sha256,
        "space": tuning.space.name,
        "cost_table": table.content_hash,
    }
