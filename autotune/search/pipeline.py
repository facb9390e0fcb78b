"""``autotune search``: from models and prompts to a decoding profile. Every stage stores what the next run can
reuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import DraftVariant, variants_json
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.documents.subnet import Subnet
from autotune.files import content_key, write_table
from autotune.machine.contention_monitor import wait_until_idle
from autotune.measuring.settings import CostSettings
from autotune.measuring.tables import priced_variants, print_table
from autotune.recording.traces import RecordingTimes, degenerate_in, print_agreement, recorder_of
from autotune.replay.evaluator import Evaluator
from autotune.replay.trace import Trace
from autotune.search.inputs import SearchInputs
from autotune.search.plan import UNTIMED_STAGES, Plan, StageClock, make_plan, measure_rates
from autotune.search.prices import table_for_gpu
from autotune.search.profile_selection import ProfileSelection
from autotune.search.screening import print_screened, screen, survivors
from autotune.search.thresholds import ANSWERS_SHARE, CONFIRMING, MIN_TRACED_PROMPTS, MIN_TREE_SEARCH_S, STAGES
from autotune.search.tree_search import TreeSearchResult, search_trees
from autotune.search.tuning_prompts import TuningPrompts
from autotune.study.document import StudyDocument, StudyDraft
from autotune.study.frames import Study
from autotune.study.ledger import Ledger, Record
from autotune.study.search_settings import SearchSettings, check_settings
from autotune.trees.policy import compile_steps


def search(settings: SearchSettings, console: Console) -> DecodingProfile:
    """Search a decoding profile, and write it. An interrupted search resumes; searches with one ``storage`` share the
    work.

    The budget begins when the models are loaded.
    """
    settings = check_settings(settings)
    assert settings.output is not None, "the check has chosen one"
    run = _SearchRun(settings, console)
    run.begin()
    run.make_plan()
    with run.stage("cost table"):
        table = run.cost_table()
    variants = run.variants
    if len(variants) > run.space.survivors:
        with run.stage("screening"):
            variants = run.screen(table)
    with run.stage("traces"):
        traces = run.record(variants)
    evaluator = Evaluator(traces, table, jobs=settings.jobs)
    prompts = TuningPrompts.of(run.tune, evaluator)
    with run.stage("tree search"):
        trees = run.search_trees(prompts.choosing)
    with run.stage("finalists and evaluation"):
        profile = run.select_profile(prompts, trees)
        warning = degenerate_in(traces[0], run.tune)
        evidence = profile.evidence.model_copy(update={"degenerate": warning})
        provenance = profile.provenance.model_copy(update={"settings_key": run.settings_key})
        profile = profile.model_copy(update={"evidence": evidence, "provenance": provenance})
        run.study["profile"] = profile.content_hash
    for path in (run.folder / f"profile-{run.key}.json", settings.output):
        profile.save(path)
    if settings.table is not None:
        write_table(settings.table, Study(run.folder, storage=settings.storage).trials_dataframe())
    console.say("time: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.stage_seconds.items()))
    console.say(f"decoding profile written to {settings.output}")
    return profile


class _SearchRun(SearchInputs):
    """The study of one search, and its stages."""

    def __init__(self, settings: SearchSettings, console: Console) -> None:
        self.stage_seconds: dict[str, float] = {}
        if settings.storage is not None:
            self.ledger = Ledger(settings.storage)  # fails before models are loaded
        loading, thread = time.monotonic(), ThreadPoolExecutor(1)
        compiled = thread.submit(compile_steps)
        thread.shutdown(wait=False)  # an error of a model is not kept waiting
        super().__init__(settings, console)
        compiled.result()
        self.loading_s = time.monotonic() - loading
        self.settings_key = settings.key
        settings = self.settings
        self.key = content_key([self.settings_key, self.model_pool.key])  # of the files of this search alone
        self.study: dict[str, Any] = {}  # of the study document, once the cost table is there
        console.say(f"target {settings.target}, draft {', '.join(settings.drafts)}, workload {settings.workload}")
        console.say(f"study in {self.folder}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and save the study after it."""
        started = time.monotonic()
        yield
        self.stage_seconds[name] = time.monotonic() - started
        path = self.folder / f"study-{self.key}.json"
        is_of_ended = path.exists() and '"profile": ""' not in path.read_text()
        if "profile" in self.study or (self.study and not is_of_ended):  # which is kept until this run ends, too
            document = StudyDocument(**self.study, records=self.ledger.used_keys, stage_seconds=self.stage_seconds)
            document.save(path)

    def begin(self) -> None:
        """Wait as the settings say, before anything is timed on this device, and begin the budget."""
        settings = self.settings
        if settings.wait_until_idle_s is not None and self.device is not None:
            wait_until_idle(settings.wait_until_idle_s, self.device, self.console)
        self.started = time.monotonic()
        self.clock = StageClock(self.started + settings.budget_s, STAGES if self.device else UNTIMED_STAGES)
        self.console.say(f"models loaded in {self.loading_s:.0f} s; the budget of {settings.budget_s:g} s begins now")

    def make_plan(self) -> None:
        """Cut the workloads to what fits into the budget."""
        settings, pool, keys_of = self.settings, self.model_pool, self.model_pool.answer_keys.of_workload
        size = self.size

        def make() -> Record:
            rates = measure_rates(pool.plain_decoder(), self.tune)
            spent_s = time.monotonic() - self.started
            return make_plan(size, rates, seconds=settings.budget_s, spent_s=spent_s).model_dump(mode="json")

        documents = [keys_of(self.tune), keys_of(self.evaluate), asdict(size)]
        self.plan = Plan.model_validate(self.shared_decision("plan", documents, make), strict=False)
        self.console.say(self.plan.describe(size))
        self.console.detail(self.plan.rates.describe())
        self.clock.set_share("screening", self.plan.screening_share)
        self.clock.kept_s = self.plan.kept_s
        limit = self.plan.max_new_tokens
        self.evaluate = self.evaluate.cut(len(self.evaluate.prompts), limit)
        tune, recorder = self.tune.cut(self.plan.num_tune_prompts, limit), recorder_of(pool, self.folder)
        if any(prompt.earlier for prompt in tune.prompts):  # held-out turns follow their answers where they are run
            now = time.monotonic()
            deadline = now + ANSWERS_SHARE * (self.clock.deadline_of("traces") - now)
            num_followed = self.shared_decision(
                "num_followed", [*documents, keys_of(tune)], lambda: len(recorder.follow(tune, deadline).prompts)
            )
            tune = tune.cut(num_followed)
        self.tune = recorder.follow(tune)

    def cost_table(self) -> CostTable:
        """The device's cost table, and the study document."""
        settings = self.settings
        if self.device is None:
            priced = priced_variants(self.variants)
            table = table_for_gpu(str(settings.gpu), self.model_pool, priced, settings.mode, say=self.console.say)
            table.save(self.folder / f"{table.content_hash}.cost.json")
        else:
            # Not the deadline of the stage: the limit is part of the table's key.
            limit_s = self.plan.table_limit_s(min(CostSettings.time_limit_s, STAGES["cost table"] * settings.budget_s))
            table = self.table(self.tune, limit_s)
        self.study = dict(
            provenance=stamp(settings_key=self.settings_key),
            command=settings.command,
            target=self.model_pool.target_reference,
            target_shape=self.model_pool.target.shape,
            drafts=[
                StudyDraft(kind=self.model_pool.kind(id), reference=known, shape=self.model_pool.draft(id).shape)
                for id, known in self.model_pool.references.items()
            ],
            hardware=table.device,
            workload=settings.workload,
            tune_sha256=self.tune.sha256,
            space=self.space.name,
            cost_table=table.content_hash,
        )
        print_table(table, self.console)
        return table

    def screen(self, table: CostTable) -> list[DraftVariant]:
        """The draft variants whose trees are searched."""
        pool, tune, ledger, console = self.model_pool, self.tune, self.ledger, self.console
        times = {"deadline": self.clock.deadline_of("screening"), "limit": self.clock.limit_of("screening")}
        jobs = self.settings.jobs
        screened = screen(pool, self.variants, table, tune, self.folder, ledger, console, jobs=jobs, **times)
        documents = [variants_json(self.variants), table.content_hash, pool.answer_keys.of_workload(tune)]
        best = survivors(screened, self.space.survivors)
        decided = self.shared_decision("survivors", documents, lambda: variants_json(best))
        chosen = [(draft, Subnet.model_validate(subnet, strict=False)) for draft, subnet in decided]
        print_screened(screened, chosen, console)
        return chosen

    def shared_decision(self, what: str, documents: object, decide: Callable[[], Any]) -> Any:
        """A decision that depends on how much was done in time. It is a record: workers that share a ledger agree on
        it, and the same command continues with it.
        """
        key = content_key([what, self.model_pool.key, self.settings.budget_s, documents])
        return self.ledger.work("decisions", {key: lambda: {what: decide()}})[key][what]

    def record(self, variants: Sequence[DraftVariant]) -> list[Trace]:
        """Traces of the variants on the tuning prompts that are recorded in time."""
        least = {"least": self.clock.limit_of("traces"), "num_least": MIN_TRACED_PROMPTS}
        times = RecordingTimes.until(self.clock.deadline_of("traces"), ANSWERS_SHARE, **least)
        longest_s = self.plan.rates.answer_s(max(prompt.settings.max_new_tokens for prompt in self.tune.prompts))
        traces = self.traces(variants, self.tune, answer_s=longest_s, times=times)
        answers = self.model_pool.answer_keys.of_workload(self.tune)
        documents = [variants_json(variants), answers, self.bounds.model_dump()]
        num_prompts = self.shared_decision("num_prompts", documents, lambda: traces[0].num_prompts)
        self.tune = self.tune.cut(num_prompts)
        if traces[0].num_prompts != num_prompts:  # another worker or run had time for more or fewer
            traces = self.traces(variants, self.tune)
        self.study |= {"tune_sha256": self.tune.sha256, "traces": [trace.header.file for trace in traces]}
        print_agreement(traces, self.console)
        return traces

    def search_trees(self, evaluator: Evaluator) -> TreeSearchResult:
        """The fastest configurations by replay of the choosing prompts."""
        table, bounds = evaluator.table.content_hash, self.bounds.model_dump()
        answers = self.model_pool.answer_keys.of_workload(self.tune)
        with self.console.stage("tree search") as update:
            result = search_trees(
                evaluator,
                self.space,
                self.ledger,
                num_trials=self.settings.num_trials,
                documents=[self.model_pool.key, answers, CONFIRMING, table, bounds],
                seed=self.settings.seed,
                deadline=max(self.clock.deadline_of("tree search"), time.monotonic() + MIN_TREE_SEARCH_S),
                report=update,
            )
        self.console.say(
            f"{result.num_replayed:,} configurations replayed; plain decoding: {evaluator.ar_ms_per_token:.2f} ms/token"
        )
        self.study["optuna_study"] = result.optuna_study
        return result

    def select_profile(self, prompts: TuningPrompts, trees: TreeSearchResult) -> DecodingProfile:
        """Measure finalists, operating points and the profile; on another device, predict them."""
        settings, pool, plan = self.settings, self.model_pool, self.plan
        selection = ProfileSelection(
            trees, pool, prompts, self.folder, self.evaluate, settings.seed, plan.kept_prompts, self.clock, self.console
        )
        if self.device is None:
            profile = selection.predicted_profile()
        elif settings.storage is None:
            profile = selection.measured_profile()
        else:  # one worker measures for all of them
            fastest = trees.fastest[0].key
            table = prompts.full.table.content_hash
            held_out = pool.answer_keys.of_workload(self.evaluate)
            key = content_key(["profile", fastest, held_out, settings.budget_s, settings.seed, table])
            units = {key: lambda: selection.measured_profile().model_dump(mode="json")}
            profile = DecodingProfile.model_validate(self.ledger.work("profile", units)[key], strict=False)
        if (finalists := selection.finalists) is not None:
            updated = finalists.prompts.full.table
            updated.save(self.folder / f"{updated.content_hash}.cost.json")
            results = {"finalists": finalists.finalists, "defaults": finalists.defaults}
            self.study |= {**results, "cost_table": updated.content_hash}
        limit = plan.max_new_tokens or settings.max_new_tokens
        workload = profile.workload.model_copy(update={"max_new_tokens": limit, "temperature": settings.temperature})
        variables = settings.chat_template_kwargs or {}
        return profile.model_copy(update={"workload": workload, "chat_template_kwargs": variables})
