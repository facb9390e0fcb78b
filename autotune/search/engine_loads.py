"""The best depth of an engine's drafts for every number of requests at once. Loads no torch."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.console import Console
from autotune.documents.decoded import tokens_per_pass
from autotune.documents.loads import Figure, LoadResult, LoadRun, Schedule, ServedLoad, loads_table
from autotune.documents.speculation import DEEPEST, Speculation
from autotune.engines.backend import Backend
from autotune.evaluation.summary import bootstrap_product, bootstrap_ratio
from autotune.files import append_line, content_key, read_lines
from autotune.trees.limits import Floats

Runs = Mapping[int, Mapping[int, LoadRun]]
"""Runs by number of requests at once, and by depth."""


# -------- figures


def client_ms_per_token(run: LoadRun) -> float:
    """Time of a client for a token, prompts included."""
    return 1e3 * sum(run.seconds) / sum(run.tokens)


def throughput_ratio(run: LoadRun, other: LoadRun) -> Figure:
    """Throughput of a run over another's, with the same prompts in the same order; one of them may have more."""
    both = min(len(run.tokens), len(other.tokens))
    (tokens, seconds), (others, other_s) = (np.array([of.tokens, of.seconds])[:, :both] for of in (run, other))
    interval = bootstrap_product([tokens, other_s], [seconds, others])
    return float(tokens.sum() / seconds.sum() * other_s.sum() / others.sum()), *interval


def served_load(run: LoadRun) -> ServedLoad:
    first_ms, decode_ms, following = np.array(run.latencies).T
    following = np.maximum(following, 1)
    return ServedLoad(
        label=run.label,
        requests=len(run.tokens),
        tokens_per_second=_figure(run.at_once * np.array(run.tokens), np.array(run.seconds)),
        first_token_ms=_figure(first_ms, np.ones_like(first_ms)),
        token_ms=_figure(decode_ms, following),
        p95_ms=(float(np.percentile(first_ms, 95)), float(np.percentile(decode_ms / following, 95))),
        hit_rate=run.hit_rate,
        identical=run.identical,
    )


def _figure(above: Floats, below: Floats) -> Figure:
    return float(above.sum() / below.sum()), *bootstrap_ratio(above, below)


# -------- the best depth


def next_depth(
    ms: Mapping[int, Mapping[int, float]], tokens: Mapping[int, float], first: Sequence[int] = ()
) -> int | None:
    """The depth that is measured next, in a server that is given every load; None if no other one can be the best.

    A token of depth k takes ``p + t(k) / tokens[k]``: p for prompts, and t for a round. At a fixed load, t rises with
    the depth, and ever faster, on every device that is known: a pass takes the same time as long as the memory limits
    it, and time for each token beyond. The tokens of a round rise ever slower. So the loss
    ``tokens[k] * (ms[k] - best)`` is convex from depth 1 on, whatever p is, and lines through measured depths bound it
    from below, which finds the exact optimum. Among the depths that can be better, the first is the one that
    interpolation between measured rounds finds the fastest.

    Args:
        ms: times of a token as ``client_ms_per_token`` by load and depth.
        tokens: tokens per pass by depth, 1 for depth 0.
        first: depths that are measured in any case, as are the greatest one and no drafts.
    """
    for depth in (0, *first, max(tokens)):
        if any(depth not in of_load for of_load in ms.values()):
            return depth
    hopes = [
        (interpolated(of_load, tokens, depth) / min(of_load.values()), depth)
        for of_load in ms.values()
        for depth in tokens.keys() - of_load.keys()
        if least_loss(of_load, tokens, depth) < 0
    ]
    return min(hopes)[1] if hopes else None


def interpolated(ms: Mapping[int, float], tokens: Mapping[int, float], depth: int) -> float:
    """The time of a token at a depth, by linear interpolation between measured rounds."""
    known = sorted(ms)
    return float(np.interp(depth, known, [ms[at] * tokens[at] for at in known])) / tokens[depth]


def least_loss(ms: Mapping[int, float], tokens: Mapping[int, float], depth: int) -> float:
    """A lower bound of ``tokens[depth] * (ms[depth] - best)`` for a depth that was not measured (``next_depth``)."""
    best = min(ms.values())
    rising = [ms[known] * tokens[known] - best * tokens[depth] for known in ms if known < depth]
    loss = {known: tokens[known] * (ms[known] - best) for known in sorted(ms) if known}
    lines = [
        loss[a] + (loss[b] - loss[a]) * (depth - a) / (b - a)
        for a, b in itertools.combinations(loss, 2)
        if not a < depth < b
    ]
    return max(rising + lines)


def chosen_depth(runs: Mapping[int, LoadRun]) -> int:
    """The least depth whose throughput may be that of the fastest one."""
    fastest = min(runs, key=lambda depth: client_ms_per_token(runs[depth]))
    return min(d for d in runs if d == fastest or throughput_ratio(runs[d], runs[fastest])[2] >= 1.0)


def schedule_of(depths: Mapping[int, int], ms: Mapping[int, Mapping[int, float]], most: int) -> Schedule:
    """Depths for all numbers of requests at once, from those for some loads. The depth changes at the geometric mean of
    two loads, but speculation ends where its gain does, interpolated over the logarithm of the load.

    Args:
        ms: as ``next_depth`` has it; a load may be missing.
        most: the end of the last range.
    """
    schedule, first = Schedule(), 1
    for load, following in itertools.pairwise(sorted(depths)):
        depth, share = depths[load], 0.5
        if depths[following] == 0 < depth and load in ms:
            gain, loss = (math.log(ms[at][0] / ms[at][depth]) for at in (load, following))
            share = gain / (gain - loss) if gain > 0 > loss else share
        if depth != depths[following]:
            last = min(max(int(load ** (1 - share) * following**share), load), following - 1)
            schedule.append((first, last, depth))
            first = last + 1
    return [*schedule, (first, max(most, *depths), depths[max(depths)])]


# -------- measuring


@dataclass(frozen=True)
class LoadServers:
    """Servers of a backend that are given loads.

    Attributes:
        recorded: plain answers of the prompts, as the backend recorded them.
        folder: where runs are kept, so that an interrupted search goes on; None: nowhere.
    """

    backend: Backend
    recorded: Any
    console: Console
    folder: Path | None = None

    def serve(self, runs: Runs, configuration: Speculation | None, depth: int) -> dict[int, dict[int, LoadRun]]:
        """The runs with those of new servers of a depth, without the loads that these do not hold."""
        deployment = self.backend.deploy(configuration).model_dump(mode="json")
        key = content_key([deployment, [answer.tokens_sha256 for answer in self.recorded.answers]])
        file = self.folder and self.folder / f"loads-{key}.jsonl"
        served = {run.at_once: run for run in map(LoadRun.model_validate, read_lines(file) if file else ())}
        missing = [load for load in runs if load not in served]
        for run in self.backend.at_loads(configuration, self.recorded, missing):
            if run.failure:
                self.console.say(f"left out   {run.at_once} requests at once: {run.failure}")
                continue
            rate = 1e3 * run.at_once / client_ms_per_token(run)
            self.console.say(f"load       {run.at_once} requests at once, {run.label}: {rate:,.0f} tokens/s")
            served[run.at_once] = run
            if file:
                append_line(file, run.model_dump(mode="json"))
        return {load: {**of_load, depth: served[load]} for load, of_load in runs.items() if load in served}

    def by_depth(self, given: Speculation, loads: Sequence[int], until: float) -> Runs:
        """Runs by load and depth, until the best depth of every load is among them or the time is over.

        Args:
            given: settings of the type, whose own depth is measured in any case.
        """
        first = given.depth or DEEPEST
        deepest = max(other.depth or 0 for other in self.backend.configurations() if other.type == given.type)
        depths = {depth: given.at_depth(depth) for depth in range(min(DEEPEST, deepest) + 1)} | {first: given}
        tokens = {depth: self._tokens_per_pass(configuration) for depth, configuration in depths.items()}
        runs: Runs = {load: {} for load in loads}
        while runs and (depth := next_depth(times_of(runs), tokens, [first])) is not None:
            if time.monotonic() > until and depth not in (0, first):
                self.console.say("loads      the time is over before all depths that may be better; raise --budget")
                break
            runs = self.serve(runs, depths[depth], depth)
        return runs

    def _tokens_per_pass(self, configuration: Speculation | None) -> float:
        counts = self.backend.replay(configuration, self.recorded).counts
        answered = zip(self.recorded.answers, counts, strict=False)
        return tokens_per_pass((answer.new_tokens - 1, rounds, accepted) for answer, (rounds, _, accepted) in answered)

    def results(self, runs: Runs, depths: Mapping[int, int]) -> list[LoadResult]:
        """The runs of the chosen depths beside those without speculation, which are shown."""
        results = [
            LoadResult(
                at_once=load,
                depth=depths[load],
                depths=sorted(of_load),
                chosen=served_load(of_load[depths[load]]),
                off=served_load(of_load[0]),
                ratio=throughput_ratio(of_load[depths[load]], of_load[0]),
            )
            for load, of_load in sorted(runs.items())
        ]
        self.console.show(loads_table(results))
        return results


def times_of(runs: Runs) -> dict[int, dict[int, float]]:
    """Times of a token, as ``next_depth`` has them."""
    return {load: {depth: client_ms_per_token(run) for depth, run in of_load.items()} for load, of_load in runs.items()}


def tune_loads(
    servers: LoadServers, loads: Sequence[int], given: Speculation, chosen: Speculation | None, until: float
) -> tuple[list[LoadResult], Schedule, Speculation | None]:
    """The best depth of each load, the depths for all numbers of requests at once, and the settings to deploy.

    Args:
        given: settings of the type that is tuned.
        chosen: those that races have chosen for one request at a time, which stay; None: off.
    """
    runs = servers.by_depth(given, loads, until)
    depths = {load: chosen_depth(of_load) for load, of_load in runs.items()} | {
        1: 0 if chosen is None else given.depth or 0
    }
    schedule = schedule_of(depths, times_of(runs), servers.backend.most_requests) if runs else []
    if servers.backend.most_requests and len(schedule) > 1:
        deepest = given.at_depth(max(depth for *_, depth in schedule))
        chosen = deepest and deepest.model_copy(update={"schedule": schedule})
    return servers.results(runs, depths), schedule, chosen


def deployed_loads(servers: LoadServers, loads: Sequence[int], deployed: Speculation | None) -> list[LoadResult]:
    """The results of deployed settings, beside no speculation."""
    depth, runs = 0, servers.serve({load: {} for load in loads}, None, 0)
    if deployed is not None:
        depth = deployed.depth or DEEPEST
        runs = servers.serve(runs, deployed, depth)
    return servers.results(runs, dict.fromkeys(runs, depth))
