"""The runtime as a backend: its drafts and trees behind the methods that every backend has. Its tuning is
``search.pipeline``, which chooses among more configurations than can be listed. Loads no torch before models are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded, tokens_key
from autotune.documents.decoding_profile import AR, OperatingPoint
from autotune.documents.deployment import RUNTIME
from autotune.engines.backend import Backend, Prices
from autotune.modeling.loading import reference
from autotune.search.thresholds import ANSWERS_SHARE
from autotune.study.search_settings import SearchSettings
from autotune.trees.limits import Floats
from autotune.trees.policy import POLICIES, parse_policy
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


@dataclass
class RuntimeRecord:
    """Plain decoding's answers to prompts, and traces of every draft variant along them."""

    tuning: Any
    workload: Workload
    traces: Sequence[Any]
    answers: Sequence[Decoded]
    limit_s: float = math.inf
    """For the cost table, which is measured when it is first needed."""

    @cached_property
    def evaluator(self) -> Any:
        from autotune.measuring.settings import CostSettings
        from autotune.replay.evaluator import Evaluator
        from autotune.search.prices import local_table

        limit_s = min(self.limit_s, CostSettings.time_limit_s)
        return Evaluator(self.traces, local_table(self.tuning, self.workload, limit_s))


class RuntimeSteps(NamedTuple):
    """Counts and predicted milliseconds of each prompt."""

    counts: Sequence[tuple[int, int, int]]
    ms: Floats


class RuntimePrices(Prices):
    """Trees may depend on prices, so that a replay has its times."""

    def ms(self, steps: RuntimeSteps) -> Floats:
        return steps.ms


class RuntimeBackend(Backend):
    """Decoding in this process.

    Args:
        tuning: ``Tuning``; by default those of a search of the model without further options.
    """

    name = RUNTIME

    def __init__(self, model: str, tuning: Any = None, *, console: Console | None = None, seed: int = 0) -> None:
        self.model = reference(model)
        self.console = console or Console()
        self.settings = SearchSettings(target=model, seed=seed)
        self.given = tuning
        self.recorded: RuntimeRecord | None = None

    @cached_property
    def tuning(self) -> Any:
        from autotune.search.tuning import Tuning

        return self.given or Tuning.load(self.settings, self.console)

    @cached_property
    def precision(self) -> str:  # type: ignore[override]
        return str(self.tuning.pool.precision)

    def configurations(self) -> list[Configuration]:
        """For every draft variant, the default trees of the policies whose defaults the traces hold, and the trees of
        the space that can be listed. Static trees follow from traces.
        """
        space, bounds, variants = self.tuning.space, self.tuning.bounds, self.tuning.variants
        defaults = [parse_policy({"policy": name}) for name in space.trees if not POLICIES[name].is_template()]
        policies = [
            d.policy for d in defaults if d.num_proposals <= bounds.num_proposals and d.max_depth <= bounds.depth
        ]
        trees = [{"policy": policy} for policy in policies]
        trees += [tree for policy in policies for tree in space.enumerated(policy) or ()]
        found = [Configuration(tree=tree, draft=draft, subnet=subnet) for draft, subnet in variants for tree in trees]
        return list({one.key: one for one in reversed(found)}.values())[::-1]

    def record(self, prompts: Sequence[WorkloadPrompt], until: float = math.inf) -> RuntimeRecord:
        from autotune.recording.traces import record_traces

        tuning = self.tuning
        workload = Workload(tuning.tune.name, "tune", tuple(prompts))
        traces = record_traces(
            tuning.pool,
            tuning.variants,
            workload,
            tuning.folder,
            self.console,
            bounds=tuning.bounds,
            deadline=until,
            answers_share=ANSWERS_SHARE,
        )
        answers = [
            Decoded(
                arm=AR,
                prompt=prompt.name,
                prompt_sha256=prompt.sha256,
                task=prompt.settings.task,
                tokens=tokens,
                tokens_sha256=tokens_key(tokens),
                new_tokens=len(tokens),
                decode_ms=0.0,
            )
            for prompt, tokens in zip(prompts, traces[0].answers, strict=False)
        ]
        self.recorded = RuntimeRecord(tuning, workload.cut(len(answers)), traces, answers)
        return self.recorded

    def price(self, recorded: RuntimeRecord, until: float = math.inf) -> RuntimePrices:
        recorded.limit_s = max(1.0, until - time.monotonic())
        _ = recorded.evaluator
        return RuntimePrices()

    def replay(self, configuration: Configuration | None, recorded: RuntimeRecord) -> RuntimeSteps:
        if configuration is None:
            return RuntimeSteps([(0, 0, 0)] * len(recorded.answers), recorded.evaluator.ar_ms)
        found = recorded.evaluator.replay(configuration)
        accepted = [int(lengths.sum()) for lengths in found.accepted_lengths]
        counts = zip((found.rounds - found.plain_steps).tolist(), found.verified_nodes.tolist(), accepted, strict=True)
        return RuntimeSteps(list(counts), found.decode_ms)

    @contextmanager
    def arm(self, configuration: Configuration | None) -> Iterator[Any]:
        from autotune.evaluation.runtime_arms import arms_of_pool

        arms = arms_of_pool(self.tuning.pool, None)
        yield arms.plain if configuration is None else arms.arm(configuration.label, self._priced(configuration))

    def deploy(self, configuration: Configuration | None) -> OperatingPoint:  # type: ignore[override]
        return self.tuning.pool.point(configuration and self._priced(configuration))  # type: ignore[no-any-return]

    def _priced(self, configuration: Configuration) -> Configuration:
        """The configuration with the prices that its tree needs, once prompts are recorded."""
        return configuration if self.recorded is None else self.recorded.evaluator.resolve(configuration)
