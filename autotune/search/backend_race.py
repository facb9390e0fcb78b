"""``autotune search`` over backends: each is tuned in its share of the budget, and the best configuration of each races
on held-out prompts. Loads no torch before the runtime is tuned.

Of several backends, ``TUNING_SHARE`` of the budget is for tuning, in equal shares, and the rest for the race. Tuned
profiles stay in the study's folder, so that the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME, BackendResult, backends_table
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
from autotune.search.backends import BACKENDS, BackendChoice, arms_of, choose_backends
from autotune.search.engine_tuning import engine_prompts, tune_engine
from autotune.study.search_settings import SearchSettings, check_settings
from autotune.study.storage import RUNS, study_folder

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
    settings = check_settings(settings)
    choices = {choice.label: choice for choice in choose_backends(settings)}
    folder = study_folder(settings.study or f"backends-{settings.key}", settings.folder)
    console.say(f"study in {folder}")
    competition = Competition(settings, choices, folder, console)
    tuned = competition.tune()
    profile = next(iter(tuned.values())) if len(choices) == 1 else deployed(competition, tuned)
    provenance = profile.provenance.model_copy(update={"settings_key": settings.key})
    profile = profile.model_copy(update={"provenance": provenance})
    assert settings.output is not None, "the check has chosen one"
    for path in (folder / f"profile-{settings.key}.json", settings.output):
        profile.save(path)
    console.say(f"decoding profile written to {settings.output}")
    return profile


@dataclass
class Competition:
    """The backends of a search, by the labels of ``--backend``, and those that have failed."""

    settings: SearchSettings
    choices: Mapping[str, BackendChoice]
    folder: Path
    console: Console
    failed: dict[str, str] = field(default_factory=dict)
    """Why a backend is not in the race, by the choice's label."""

    def tune(self) -> dict[str, DecodingProfile]:
        """The profiles of the backends that can be tuned.

        Raises:
            UserError: there is none.
        """
        tuned = {}
        share = thresholds.TUNING_SHARE if len(self.choices) > 1 else 1.0
        budget_s = share * self.settings.budget_s / len(self.choices)
        for label, choice in self.choices.items():
            self.console.say(f"backend    {label}: tuned in {budget_s:.0f} s of the budget")
            try:
                tuned[label] = self._tuned(choice, budget_s)
            except UserError as error:
                self.leave_out(label, str(error))
        return tuned

    def _tuned(self, choice: BackendChoice, budget_s: float) -> DecodingProfile:
        """The profile of one backend, which an earlier run may have made."""
        settings, name = self.settings, choice.name
        key = content_key([settings.key, [name, choice.model, dict(choice.options)]])
        path = self.folder / f"tuned-{name}-{key}.json"
        engine = None
        if name != RUNTIME:
            engine = BACKENDS[name](choice.model, console=self.console, seed=settings.seed, **choice.options)
        model = reference(choice.model) if engine is None else engine.model
        if path.exists() and (profile := DecodingProfile.load(path)).target.is_same(model):
            self.console.say(f"backend    {choice.label}: tuned before, {path}")
            return profile
        if engine is None:
            from autotune.search.pipeline import search as search_runtime

            return search_runtime(settings.of_runtime(choice.model, budget_s, path), self.console)
        profile = tune_engine(engine, settings, budget_s, self.folder, self.console)
        profile.save(path)
        return profile

    def leave_out(self, label: str, reason: str) -> None:
        """Note that a backend is not in the race.

        Raises:
            UserError: no backend is left.
        """
        self.failed[label] = reason
        self.console.say(f"left out   {label}: {reason}")
        if len(self.failed) == len(self.choices):
            raise UserError("; ".join(f"{label}: {reason}" for label, reason in self.failed.items()))

    def race(self, tuned: Mapping[str, DecodingProfile], competing: Sequence[str]) -> Race:
        """A race of the backends' best configurations by label. Those that compete are compared; their plain decoding,
        and the other backends, run beside them. Backends that do not start, or end, are left out.
        """
        prompts = engine_prompts(self.settings, "evaluate")
        limits = [profile.workload.max_new_tokens for profile in tuned.values()]
        prompts = prompts.cut(len(prompts.prompts), min((limit for limit in limits if limit), default=None))
        deadline = time.monotonic() + (1 - thresholds.TUNING_SHARE) * self.settings.budget_s
        with ExitStack() as stack:
            racing: dict[str, Arm] = {}
            for label, profile in tuned.items():
                command = self.choices[label].options.get("command")
                arms_of_profile = arms_of(profile, device=self.settings.device, command=command, console=self.console)
                try:
                    arms = stack.enter_context(arms_of_profile)
                except UserError as error:
                    self.leave_out(label, str(error))
                    continue
                racing[label] = arms.get(TUNED, arms[AR])
                if label in competing and TUNED in arms:
                    racing[f"{label}{PLAIN}"] = arms[AR]
            for name, arm in racing.items():
                arm.name = name
            num_competing = sum(name in competing for name in racing)
            rule = Fastest(
                risk=thresholds.RISK,
                tolerance=thresholds.PROCESS_DIFFERENCE,
                prompts_per_block=thresholds.HELD_OUT_PROMPTS,
                always=[name for name in racing if name not in competing],
                ends=lambda leaders: len(leaders) <= 1 < num_competing,
            )
            context = [profile.content_hash for profile in tuned.values()]
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
        for label in tuned:
            if label in raced.failed:
                self.leave_out(label, raced.failed[label])
        return raced


def deployed(competition: Competition, tuned: Mapping[str, DecodingProfile]) -> DecodingProfile:
    """The profile of the backend that is deployed, with the race between all of them."""
    settings, console = competition.settings, competition.console
    matching = [label for label, profile in tuned.items() if has_own_weights(settings, profile)]
    competing = list(tuned) if settings.any_weights or not matching else matching
    if not matching:
        console.say(f"no backend has the weights of {settings.target} at its precision: all compete")
    raced = competition.race(tuned, competing)
    runs = {label: raced.runs[label] for label in tuned if label not in competition.failed}
    remaining = [label for label in raced.remaining if label in runs]
    winner = remaining[0] if remaining else min(runs, key=lambda label: ms_per_token(runs[label]))
    plain = raced.runs.get(f"{winner}{PLAIN}", runs[winner])
    reference_runs = next((runs[label] for label in matching if label in runs), runs[winner])
    num_shared = min(map(len, runs.values()))
    results = []
    for label, of_backend in runs.items():
        profile, summary = tuned[label], summarize(label, of_backend, plain[: len(of_backend)])
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
                has_own_weights=label in matching,
                is_deployed=label == winner,
                is_slower=label in competing and label not in remaining,
            )
        )
    choices = competition.choices
    results += [
        BackendResult(
            backend=choices[label].name, model=ModelReference(id=choices[label].model, sha256=""), failure=reason
        )
        for label, reason in competition.failed.items()
    ]
    console.show(backends_table(results))
    evidence = tuned[winner].evidence.model_copy(update={"backends": results})
    return tuned[winner].model_copy(update={"evidence": evidence})


def has_own_weights(settings: SearchSettings, profile: DecodingProfile) -> bool:
    """Whether a backend loads the weights of ``--target`` at its precision: the same file, or a file of the same sizes
    in the target's data type.
    """
    model = profile.target
    with suppress(UserError):
        config = sizes_of(settings.target)[1]
        dtype = settings.dtype or config.get("dtype") or config.get("torch_dtype")
        if model.is_same(reference(settings.target, weights=False)):
            return dtype in (None, profile.dtype)
        sizes = sizes_of(model.id)[1]
        return dtype == profile.precision and all(sizes.get(name) == config.get(name) for name in SIZES)
    return model.id == settings.target


def agreement(runs: Sequence[Decoded], others: Sequence[Decoded]) -> float:
    """Mean share of the tokens of answers before the first that differs from the other's."""
    shares = []
    for run, other in zip(runs, others, strict=False):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(run.tokens, other.tokens, strict=False))
        shares.append(sum(1 for _ in same) / max(1, len(run.tokens), len(other.tokens)))
    return sum(shares) / max(1, len(shares))
