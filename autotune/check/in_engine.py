"""A check of an engine's profile: its server and a plain one are started and compared. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from autotune.check.checked import CheckedBackend, CheckedWorkload, Side, evidence_for
from autotune.check.comparison import require_comparable
from autotune.check.gates import counts_gate
from autotune.check.result import REPLAY, Gate
from autotune.check.settings import CheckSettings
from autotune.check.versions import base_of
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import Deployment
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend
from autotune.errors import NotComparable, UserError
from autotune.evaluation.not_slower import PAIRS_PER_LAUNCH
from autotune.files import content_key
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint
from autotune.workloads.workload import Workload

Restore = Callable[..., Backend]
"""Finds the backend of a profile, with another executable and arguments if ``command`` names them
(``search.backends.restored_backend``).
"""

SHOWN_BUILD = 20  # characters of a build, which may be a hash


class CheckedEngine(CheckedBackend):
    rounding = "a batch of tokens rounds otherwise than one token"

    def __init__(self, settings: CheckSettings, profile: DecodingProfile, console: Console, restore: Restore) -> None:
        super().__init__(settings, profile.located(settings.profile), console)
        self.restore = restore
        self.backend = restore(self.profile, command=settings.engine_command, console=console)
        self.precision, self.hardware = self.backend.precision, cpu_fingerprint(num_cores())

    def check(self, workload: Workload) -> CheckedWorkload:
        """Check a workload in new servers, whose drafts follow from its answers alone.

        Raises:
            NotComparable: another build than the profile's refuses the settings, or answers every prompt otherwise.
        """
        configuration = deployment_of(self.profile).speculation
        with ExitStack() as servers:
            self.arms = [servers.enter_context(self.backend.arm(None))]
            other_build = self._other_build()
            if configuration is not None:
                try:
                    self.arms.append(servers.enter_context(self.backend.arm(configuration)))
                except UserError as error:
                    raise NotComparable(f"{error}; {other_build}; search again") if other_build else error from None
            for name, arm in zip((AR, TUNED), self.arms, strict=False):
                arm.name = name
            checked = super().check(workload)
        known = {run.tokens_sha256 for run in self.profile.evidence.prompts}
        is_other = bool(known) and known.isdisjoint(run.tokens_sha256 for run in checked.runs)
        if other_build and is_other and self.settings.against is None:
            raise NotComparable(f"{other_build}; it answers every prompt otherwise, so no counts compare; search again")
        if configuration is not None and not configuration.model:
            checked.gates.insert(2, self._replay_gate(configuration, checked))
        return checked

    def _other_build(self) -> str:
        """The builds of the profile and of the engine that runs, if they differ; else empty."""
        before, now = deployment_of(self.profile).build[:SHOWN_BUILD], self.backend.deploy(None).build[:SHOWN_BUILD]
        if before in ("", now):
            return ""
        text = f"the profile was measured with build {before} of {self.profile.backend}, and build {now} runs"
        self.console.say(text)
        return text

    def prepared(self, workload: Workload) -> Workload:
        return workload.first_turns()

    def differences(
        self, workload: Workload, runs: Sequence[Decoded], plain: Sequence[Decoded]
    ) -> tuple[dict[str, str], bool]:
        differences = {}
        for run, other in zip(runs, plain, strict=True):
            pairs = [*zip(run.tokens, other.tokens, strict=False)]
            first = next((number for number, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
            if run.tokens != other.tokens:
                differences[run.prompt] = f"token {first}"
        return differences, True

    def _replay_gate(self, configuration: Speculation, checked: CheckedWorkload) -> Gate:
        """The gate on the counts compared with the replay's, by which the search has chosen. Chains of draft models are
        replayed approximately, and have none.
        """
        recorded = self.backend.record(checked.workload.prompts)  # in a server of its own
        replayed = self.backend.replay(configuration.for_requests(1), recorded).counts
        predicted = [_counted(answer, *counts) for answer, counts in zip(recorded.answers, replayed, strict=True)]
        counted = [_counted(run, run.rounds, run.verified_nodes, run.accepted_tokens) for run in checked.runs]
        has_others = [run.tokens_sha256 for run in counted] != [answer.tokens_sha256 for answer in predicted]
        return counts_gate(
            counted,
            predicted,
            None,
            name=REPLAY,
            workload=checked.workload.name,
            source="the replay",
            tolerance=None,
            tolerated_changes=getattr(self.backend, "tolerated_mismatches", 0.0),
            advisory_reason="drafts follow from earlier answers, and some differ" if has_others else "",
            rounding=self.rounding,
        )

    @contextmanager
    def sides(self, folder: Path) -> Iterator[tuple[Side, Side]]:
        """The base is deployed by the profile ``--against``, or by the checked profile's file in a git revision."""
        profile, against = self.settings.profile, str(self.settings.against)
        with base_of(against, profile, folder) as version:
            base = DecodingProfile.load(version.profile).located(version.profile).located(profile)
        require_comparable(base, self.profile, version.label)  # before the base's engine is looked for
        backend = self.restore(base, command=None, console=self.console)
        yield _side(version.label, base, backend), _side(str(profile), self.profile, self.backend)

    def measured_sides(self, checked: CheckedWorkload) -> tuple[Side, Side] | str | None:
        profile, evidence = self.profile, self.profile.evidence
        measured = evidence_for(profile, checked.workload, checked.runs, self.settings)
        if isinstance(measured, str) or deployment_of(profile).speculation is None:
            return None
        known = {
            run.prompt_sha256: math.log(run.token_ms / plain_ms)
            for run, plain_ms in zip(measured, evidence.plain_token_ms, strict=False)
            if run.decode_ms > 0 and plain_ms > 0
        }
        for is_missing, reason in (
            (profile.hardware.key != self.hardware.key, f"the profile was measured on {profile.hardware.key}"),
            (
                len(known) < PAIRS_PER_LAUNCH,
                f"the profile has times of plain decoding and its own for {len(known)} of these prompts, and "
                f"{PAIRS_PER_LAUNCH} are needed; search again, or give --against",
            ),
        ):
            if is_missing:
                return reason
        return (
            _side("plain decoding", profile, self.backend, is_plain=True),
            replace(_side(str(self.settings.profile), profile, self.backend), known=known),
        )


def deployment_of(profile: DecodingProfile) -> Deployment:
    assert profile.point.deployment is not None, "a profile of the runtime"
    return profile.point.deployment


def _side(label: str, profile: DecodingProfile, backend: Backend, *, is_plain: bool = False) -> Side:
    configuration = None if is_plain else deployment_of(profile).speculation
    key = content_key(backend.deploy(configuration).model_dump(mode="json"))
    return Side(label, key, profile, lambda: backend.arm(configuration))


def _counted(answer: Decoded, verifications: int, drafted: int, accepted: int) -> Decoded:
    """An answer with these counts."""
    counts = {"target_forwards": verifications, "verified_nodes": drafted, "accepted_lengths": [accepted]}
    return answer.model_copy(update=counts)
