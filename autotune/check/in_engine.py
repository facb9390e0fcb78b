"""A check of an engine's profile: its server and a plain one are started and compared. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from autotune.check.checked import CheckedBackend, CheckedWorkload, Side
from autotune.check.comparison import require_comparable
from autotune.check.gates import Difference, counts_gate
from autotune.check.result import REPLAY, Gate
from autotune.check.settings import CheckSettings
from autotune.check.versions import base_of
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend
from autotune.files import content_key
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint
from autotune.workloads.workload import Workload

Restore = Callable[..., Backend]
"""Finds the backend of a profile, with another executable and arguments if ``command`` names them
(``search.backends.restored_backend``).
"""


class CheckedEngine(CheckedBackend):
    rounding = "a batch of tokens rounds otherwise than one token"

    def __init__(self, settings: CheckSettings, profile: DecodingProfile, console: Console, restore: Restore) -> None:
        super().__init__(settings, profile.located(settings.profile), console)
        self.restore = restore
        self.backend = restore(self.profile, command=settings.engine_command, console=console)
        self.precision, self.hardware = self.backend.precision, cpu_fingerprint(num_cores())

    def load(self) -> None:
        """Nothing: every workload has new servers."""

    def close(self) -> None:
        """Nothing: a checked workload has stopped its servers."""

    def check(self, workload: Workload, folder: Path) -> CheckedWorkload:
        """Check a workload in new servers, whose drafts follow from its answers alone."""
        configuration = speculation_of(self.profile)
        with ExitStack() as self.servers:
            self.arms = [self.servers.enter_context(self.backend.arm(None))]
            if configuration is not None:
                self.arms.append(self.servers.enter_context(self.backend.arm(configuration)))
            for name, arm in zip((AR, TUNED), self.arms, strict=False):
                arm.name = name
            return super().check(workload, folder)

    def prepared(self, workload: Workload) -> Workload:
        return workload.first_turns()

    def differences(
        self, workload: Workload, runs: Sequence[Decoded], plain: Sequence[Decoded]
    ) -> Sequence[Difference]:
        differences = []
        for run, other in zip(runs, plain, strict=True):
            pairs = [*zip(run.tokens, other.tokens, strict=False)]
            first = next((number for number, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
            if run.tokens != other.tokens:
                differences.append(Difference(run.prompt, f"token {first}", is_rounding=True))
        return differences

    def gates(self, workload: Workload, runs: Sequence[Decoded]) -> list[Gate]:
        """The gate on the counts compared with the replay's, by which the search has chosen. Chains of draft models are
        replayed approximately.
        """
        configuration = speculation_of(self.profile)
        if configuration is None or configuration.model:
            return []
        self.servers.close()  # recording starts a server of its own
        recorded = self.backend.record(workload.prompts)
        replayed = self.backend.replay(configuration, recorded).counts
        predicted = [_counted(answer, *counts) for answer, counts in zip(recorded.answers, replayed, strict=True)]
        counted = [_counted(run, run.rounds, run.verified_nodes, run.accepted_tokens) for run in runs]
        has_others = any(run.tokens_sha256 != answer.tokens_sha256 for run, answer in zip(runs, predicted, strict=True))
        gate = counts_gate(
            counted,
            predicted,
            None,
            name=REPLAY,
            workload=workload.name,
            source="the replay",
            tolerance=None,
            tolerated_changes=getattr(self.backend, "tolerated_mismatches", 0.0),
            advisory_reason="drafts follow from earlier answers, and some differ" if has_others else "",
            rounding=self.rounding,
        )
        return [gate]

    @contextmanager
    def sides(self, folder: Path) -> Iterator[tuple[Side, Side]]:
        """The base is deployed by the profile ``--against``, or by the checked profile's file in a git revision."""
        profile, against = self.settings.profile, str(self.settings.against)
        with base_of(against, profile, folder) as version:
            base = DecodingProfile.load(version.profile).located(version.profile).located(profile)
        require_comparable(base, self.profile, version.label)  # before the base's engine is looked for
        backend = self.restore(base, command=None, console=self.console)
        yield _side(version.label, base, backend), _side(str(profile), self.profile, self.backend)


def speculation_of(profile: DecodingProfile) -> Speculation | None:
    assert profile.point.deployment is not None, "a profile of the runtime"
    return profile.point.deployment.speculation


def _side(label: str, profile: DecodingProfile, backend: Backend) -> Side:
    configuration = speculation_of(profile)
    key = content_key(backend.deploy(configuration).model_dump(mode="json"))
    return Side(label, key, profile, lambda _: backend.arm(configuration))


def _counted(answer: Decoded, verifications: int, drafted: int, accepted: int) -> Decoded:
    """An answer with these counts."""
    counts = {"target_forwards": verifications, "verified_nodes": drafted, "accepted_lengths": [accepted]}
    return answer.model_copy(update=counts)
