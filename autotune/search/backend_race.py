"""``autotune search`` over backends: each is tuned in its share of the budget, and the best configuration of each races
on held-out prompts. Loads no torch before the runtime is tuned.

Of several backends, ``TUNING_SHARE`` of the budget is for tuning, in equal shares, and the rest for the race. Tuned
profiles stay in the study's folder, so that the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import takewhile

from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME, BackendResult
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Fastest, Race, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import ms_per_token, summarize
from autotune.files import content_key
from autotune.modeling.loading import reference
from autotune.modeling.target_defaults import sizes_of
from autotune.search import thresholds
from autotune.search.backends import BackendChoice, arms_of, choose_backends, make_backend
from autotune.search.engine_tuning import EngineTuning
from autotune.study.search_settings import SearchSettings, check_settings
from autotune.study.storage import RUNS, study_folder
from autotune.workloads.workload import Workload, WorkloadSplit

PLAIN = ", plain"  # after a backend's label: the name of its plain decoding
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")  # of models with the same weights in other files


def search_backends(settings: SearchSettings, console: Console) -> DecodingProfile:
    """Search a profile of the backends of the settings, and write it. An interrupted search goes on with what it has
    recorded.

    Raises:
        UserError: a setting cannot work, or no backend can be tuned.
    """
    if not settings.backends:
        from autotune.search.pipeline import search as search_runtime

        return search_runtime(settings, console)
    return _BackendSearch(check_settings(settings), console).run()


@dataclass
class _BackendSearch:
    """A search over the backends of ``--backend``."""

    settings: SearchSettings
    console: Console
    tuned: dict[str, DecodingProfile] = field(default_factory=dict)
    """Profiles of the backends, by the choice's label."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a backend is not in the race, by the choice's label."""

    def __post_init__(self) -> None:
        self.choices = {choice.label: choice for choice in choose_backends(self.settings)}
        self.key = self.settings.key
        self.folder = study_folder(self.settings.study or f"backends-{self.key}", self.settings.folder)
        self.console.say(f"study in {self.folder}")

    def run(self) -> DecodingProfile:
        settings, num_backends = self.settings, len(self.choices)
        budget_s = settings.budget_s * (thresholds.TUNING_SHARE if num_backends > 1 else 1.0) / num_backends
        for label, choice in self.choices.items():
            if num_backends > 1:
                self.console.say(f"backend    {label}: tuned in {budget_s:.0f} s of the budget")
            try:
                self.tuned[label] = self._tuned(choice, budget_s)
            except UserError as error:
                if num_backends == 1:
                    raise
                share = f" (its share of --budget {settings.budget_s:g}s)" if "--budget" in str(error) else ""
                self._leave_out(label, f"{error}{share}")
        profile = next(iter(self.tuned.values()))
        if num_backends > 1:
            profile = self._raced()
        provenance = profile.provenance.model_copy(update={"settings_key": self.key})
        profile = profile.model_copy(update={"provenance": provenance})
        assert settings.output is not None, "the check has chosen one"
        for path in (self.folder / f"profile-{self.key}.json", settings.output):
            profile.save(path)
        self.console.say(f"decoding profile written to {settings.output}")
        return profile

    def _leave_out(self, label: str, reason: str) -> None:
        """Note that a backend is not in the race.

        Raises:
            UserError: no backend is left.
        """
        self.failed[label] = reason
        self.console.say(f"left out   {label}: {reason}")
        if len(self.failed) == len(self.choices):
            raise UserError("; ".join(f"{label}: {reason}" for label, reason in self.failed.items()))

    def _prompts(self, split: WorkloadSplit) -> Workload:
        """The prompts that engines are given: first turns, because later ones follow a target's answers."""
        prompts = self.settings.load_prompts(split).first_turns()
        return prompts.cut(thresholds.ENGINE_PROMPTS[split])

    def _tuned(self, choice: BackendChoice, budget_s: float) -> DecodingProfile:
        """The profile of one backend, which an earlier run may have made."""
        options = [choice.name, choice.model, dict(choice.options)]
        path = self.folder / f"tuned-{choice.name}-{content_key([self.key, options])}.json"
        backend = make_backend(choice, console=self.console, seed=self.settings.seed)
        if path.exists():
            profile = DecodingProfile.load(path)
            if profile.target.is_same(backend.model):
                self.console.say(f"backend    {choice.label}: tuned before, {path}")
                return profile
        if choice.name == RUNTIME:
            from autotune.search.pipeline import search as search_runtime

            return search_runtime(self.settings.of_runtime(choice.model, budget_s, path), self.console)
        profile = EngineTuning(
            backend,
            self._prompts("tune"),
            self._prompts("evaluate"),
            self.folder / RUNS,
            self.console,
            budget_s,
            seed=self.settings.seed,
            requests_at_once=self.settings.requests_at_once,
        ).run()
        limits = {"max_new_tokens": self.settings.max_new_tokens, "temperature": self.settings.temperature}
        profile = profile.model_copy(update={"workload": profile.workload.model_copy(update=limits)})
        profile.save(path)
        return profile

    def _raced(self) -> DecodingProfile:
        """The profile of the backend that is deployed, with the race between all of them."""
        own = [label for label, profile in self.tuned.items() if self._has_own_weights(profile)]
        raced, competing = self._race(own)
        runs = {label: raced.runs[label] for label in self.tuned if label not in self.failed}
        remaining = [label for label in raced.remaining if label in runs]
        deployed = remaining[0] if remaining else min(runs, key=lambda label: ms_per_token(runs[label]))
        plain = raced.runs.get(f"{deployed}{PLAIN}", runs[deployed])
        reference_runs = next((runs[label] for label in own if label in runs), runs[deployed])
        num_shared = min(map(len, runs.values()))
        results = []
        for label, of_backend in runs.items():
            profile, summary = self.tuned[label], summarize(label, of_backend, plain[: len(of_backend)])
            results.append(
                BackendResult(
                    backend=profile.backend,
                    model=profile.target,
                    precision=profile.precision,
                    label=profile.point.label,
                    seconds=sum(run.decode_ms for run in of_backend[:num_shared]) / 1e3,
                    speedup=summary.speedup,
                    ci95=summary.ci95,
                    num_prompts=len(of_backend),
                    agreement=agreement(of_backend, reference_runs),
                    has_own_weights=label in own,
                    is_deployed=label == deployed,
                    is_slower=label in competing and label not in remaining,
                )
            )
        for label, reason in self.failed.items():
            model = ModelReference(id=self.choices[label].model, sha256="")
            results.append(BackendResult(backend=self.choices[label].name, model=model, failure=reason))
        print_results(results, num_shared, self.console)
        evidence = self.tuned[deployed].evidence.model_copy(update={"backends": results})
        return self.tuned[deployed].model_copy(update={"evidence": evidence})

    def _race(self, own: Sequence[str]) -> tuple[Race, list[str]]:
        """A race of the backends' best configurations, and the labels of those that may be deployed. These are
        compared; their plain decoding, and backends with other weights, run beside them. Those that do not start, or
        end, are left out.
        """
        prompts = self._prompts("evaluate")
        limits = [profile.workload.max_new_tokens for profile in self.tuned.values()]
        prompts = prompts.cut(len(prompts.prompts), min((limit for limit in limits if limit), default=None))
        deadline = time.monotonic() + (1 - thresholds.TUNING_SHARE) * self.settings.budget_s
        with ExitStack() as stack:
            started: dict[str, dict[str, Arm]] = {}
            for label, profile in self.tuned.items():
                command = self.choices[label].options.get("command")
                arms = arms_of(profile, device=self.settings.device, command=command, console=self.console)
                try:
                    started[label] = stack.enter_context(arms)
                except UserError as error:
                    self._leave_out(label, str(error))
            competing = [label for label in started if self.settings.any_weights or label in own]
            if not competing:
                self.console.say(f"no backend has the weights of {self.settings.target} at its precision: all compete")
                competing = [*started]
            racing = {label: arms.get(TUNED, arms[AR]) for label, arms in started.items()}
            racing |= {f"{label}{PLAIN}": started[label][AR] for label in competing if TUNED in started[label]}
            for name, arm in racing.items():
                arm.name = name
            rule = Fastest(
                risk=thresholds.RISK,
                tolerance=thresholds.PROCESS_DIFFERENCE,
                prompts_per_block=thresholds.HELD_OUT_PROMPTS,
                always=[name for name in racing if name not in competing],
                ends=lambda leaders: len(leaders) <= 1 < len(competing),
            )
            context = [profile.content_hash for profile in self.tuned.values()]
            with self.console.stage("race of backends", len(prompts.prompts)) as update:
                raced = race(
                    ArmRunner(self.folder / RUNS, context=context),
                    [*racing.values()],
                    prompts.prompts,
                    rule,
                    time_limit=TimeLimit(deadline, thresholds.MIN_PROMPTS),
                    seed=self.settings.seed,
                    report=update,
                )
        for label in started:
            if label in raced.failed:
                self._leave_out(label, raced.failed[label])
        return raced, competing

    def _has_own_weights(self, profile: DecodingProfile) -> bool:
        """Whether a backend loads the weights of ``--target`` at its precision: the same file, or a file of the same
        sizes in the target's data type.
        """
        target, deployment = self.settings.target, profile.point.deployment
        model = profile.target if deployment is None else deployment.model
        with suppress(UserError):
            config = sizes_of(target)[1]
            dtype = self.settings.dtype or config.get("dtype") or config.get("torch_dtype")
            if model.is_same(reference(target, weights=False)):
                return dtype in (None, profile.dtype)
            sizes = sizes_of(model.id)[1]
            return dtype == profile.precision and all(sizes.get(name) == config.get(name) for name in SIZES)
        return model.id == target


def agreement(runs: Sequence[Decoded], others: Sequence[Decoded]) -> float:
    """Mean share of the tokens of answers before the first that differs from the other's."""
    shares = []
    for run, other in zip(runs, others, strict=False):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(run.tokens, other.tokens, strict=False))
        shares.append(sum(1 for _ in same) / max(1, len(run.tokens), len(other.tokens)))
    return sum(shares) / max(1, len(shares))


def print_results(results: Sequence[BackendResult], num_shared: int, console: Console) -> None:
    """Print the race between backends, and what its columns stand for."""
    raced = sorted((result for result in results if not result.failure), key=lambda result: result.seconds)
    names = [f"{result.backend}, {result.precision}" for result in raced]
    rows = [
        [
            name,
            f"{result.seconds:.1f}",
            f"{result.speedup:.2f}x ({result.ci95[0]:.2f}-{result.ci95[1]:.2f})",
            f"{100 * result.agreement:.0f} %",
            "yes" if result.has_own_weights else "no",
            "yes" if result.is_deployed else "",
        ]
        for name, result in zip(names, raced, strict=True)
    ]
    columns = ["backend", "seconds", "speedup over plain", "same tokens", "own weights", "deployed"]
    deployed = next((number for number, result in enumerate(raced) if result.is_deployed), None)
    console.table(f"Backends on {num_shared} held-out prompts", columns, rows, emphasised=deployed)
    console.labels({name: f"{result.label}, {result.model.id}" for name, result in zip(names, raced, strict=True)})
