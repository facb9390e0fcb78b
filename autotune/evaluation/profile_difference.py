"""The difference between two profiles of a target: settings, figures of held-out prompts, and what explains their
speedups. Works on documents alone, and loads no torch.

A speedup is the number of tokens of a pass over the cost of a pass in plain steps. So the ratio of two speedups is the
product of two ratios: that of the acceptance, and that of the costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.documents.decoding_profile import ALL, DecodingProfile
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError
from autotune.evaluation.summary import bootstrap_product
from autotune.files import Document
from autotune.table import Table

Floats = NDArray[np.float64]
HeldOut = dict[str, list[float]]
"""The quantities of each held-out prompt that decoded something, by its hash."""
Interval = tuple[float, float, float]
"""A value and its 95 % interval, a bootstrap over prompts."""
TOKENS, PASSES, MS, PLAIN_MS = range(4)
"""Quantities of a held-out prompt: tokens after the first, passes of the target over them, and times of the profile and
of plain decoding for as many tokens.
"""
SPEEDUP, ACCEPTANCE, COST = "speedup over plain decoding", "tokens per pass", "cost of a pass, plain steps"
FIGURES: dict[str, tuple[list[int], list[int]]] = {
    SPEEDUP: ([PLAIN_MS], [MS]),
    ACCEPTANCE: ([TOKENS], [PASSES]),
    COST: ([MS, TOKENS], [PASSES, PLAIN_MS]),
    "plain decoding, ms per token": ([PLAIN_MS], [TOKENS]),
    "the profile, ms per token": ([MS], [TOKENS]),
}
"""Figures by the quantities above and below the line: products of their sums over prompts."""
COMPARED: dict[str, dict[str, Any]] = {
    "other settings": {
        **dict.fromkeys(("precision", "mode", "capture_sizes", "threads", "chat_template_kwargs"), True),
        "point": {
            **dict.fromkeys(("draft", "tree", "verification"), True),
            "deployment": {"backend": True, "model": {"id"}, "arguments": True, "speculation": True},
        },
    },
    "another build": {"provenance": {"autotune", "torch", "transformers"}, "point": {"deployment": {"build"}}},
    "other hardware": {"hardware": True},
    "other prompts": {"workload": True},
}
"""Fields of a profile by what a change of them is."""
SHOWN = 24  # characters of a value in tables
A, B, RATIO = "A", "B", "B over A"


class ProfileDifference(Document, kind="profile-difference", made_by="autotune diff"):
    """The difference between two profiles, A and B."""

    names: tuple[str, str]
    target: ModelReference
    settings: dict[str, dict[str, tuple[str, str]]]
    """A's and B's values of fields that differ, by the keys of ``COMPARED`` and by field."""
    num_shared_prompts: int
    """Held-out prompts that both have decoded; 0: each has figures of its own prompts, and none by task."""
    num_same_answers: int
    figures: dict[str, dict[str, Interval]]
    """A's, B's, and B over A, which is paired where the prompts are the same; of throughputs at the loads that both
    have. None of prompts if one has no times of plain decoding by prompt.
    """

    @property
    def explanation(self) -> list[str]:
        """The ratio of the speedups as a product, and what has changed, in sentences."""
        sentences = [
            "A or B has no times of plain decoding by prompt, so no figures of prompts are compared; search again for them."
        ]
        if SPEEDUP in self.figures:
            speedup, acceptance, cost = (self.figures[name][RATIO] for name in (SPEEDUP, ACCEPTANCE, COST))
            sentences = [
                f"The speedup of B is {shown(speedup)} times that of A: {acceptance[0]:.2f} by acceptance times "
                f"{1 / cost[0]:.2f} by the cost of a pass."
            ]
        changes = [f"{kind} ({', '.join(fields)})" for kind, fields in self.settings.items()]
        sentences.append(f"Changed: {'; '.join(changes) or 'nothing that profiles record'}.")
        if not self.num_shared_prompts:
            sentences.append("Not comparable by task: they have no held-out prompt in common.")
        elif self.num_same_answers < self.num_shared_prompts:
            sentences.append(f"Only {self.num_same_answers} of {self.num_shared_prompts} answers are the same.")
        return sentences

    def tables(self) -> list[Table]:
        """Settings that differ, and the figures, with whether the intervals of A and B have no value in common."""
        prompts = f"{self.num_shared_prompts} shared" if self.num_shared_prompts else "each profile's own"
        return [
            Table(
                "Settings that differ",
                ["setting", A, B],
                [
                    [name, *(value[:SHOWN] for value in pair)]
                    for fields in self.settings.values()
                    for name, pair in fields.items()
                ],
            ),
            Table(
                f"Figures of {prompts} held-out prompts, with 95 % intervals",
                ["figure", A, B, RATIO, "intervals"],
                [
                    [
                        name,
                        *map(shown, row.values()),
                        "apart" if row[A][2] < row[B][1] or row[B][2] < row[A][1] else "overlap",
                    ]
                    for name, row in self.figures.items()
                ],
                labels=dict(zip((A, B), self.names, strict=True)),
            ),
        ]


def shown(interval: Interval) -> str:
    return "{:.2f} ({:.2f}-{:.2f})".format(*interval)


def difference_of(a: DecodingProfile, b: DecodingProfile, names: tuple[str, str]) -> ProfileDifference:
    """
    Args:
        names: of the profiles, for people.

    Raises:
        UserError: they are of other targets.
    """
    if not a.target.is_same(b.target):
        weights = " with other weights" if a.target.id == b.target.id else ""
        raise UserError(
            f"{names[1]}: its target is {b.target.id}{weights}, that of {names[0]} is {a.target.id}, so they are not "
            "comparable; give profiles of one target"
        )
    settings = dict[str, dict[str, tuple[str, str]]]()
    for kind, fields in COMPARED.items():
        leaves = [_leaves(profile.model_dump(mode="json", include=fields)) for profile in (a, b)]
        pairs = {name: (leaves[0].get(name, "-"), leaves[1].get(name, "-")) for name in leaves[0] | leaves[1]}
        if changed := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
            settings[kind] = changed
    runs = [{run.prompt_sha256: run for run in profile.evidence.prompts} for profile in (a, b)]
    held = _held_out(a), _held_out(b)
    shared = [prompt for prompt in held[0] if prompt in held[1]]
    figures = _figures(*held, {prompt: runs[0][prompt].task or "" for prompt in shared}) if all(held) else {}
    loads = [_throughputs(profile) for profile in (a, b)]
    return ProfileDifference(
        names=names,
        target=a.target,
        settings=settings,
        num_shared_prompts=len(shared),
        num_same_answers=sum(runs[0][prompt].tokens_sha256 == runs[1][prompt].tokens_sha256 for prompt in shared),
        figures=figures | {name: _unpaired(loads[0][name], loads[1][name]) for name in loads[0] if name in loads[1]},
    )


def _leaves(content: Any, name: str = "") -> dict[str, str]:
    """The values of nested records by the keys that lead to them; a dash for null."""
    if not isinstance(content, dict):
        return {name.removeprefix(".").removeprefix("point."): "-" if content is None else str(content)}
    nested = [_leaves(value, f"{name}.{key}") for key, value in content.items()]
    return {key: value for leaves in nested for key, value in leaves.items()}


def _figures(a: HeldOut, b: HeldOut, tasks: Mapping[str, str]) -> dict[str, dict[str, Interval]]:
    """
    Args:
        tasks: of the prompts that both have, by hash.
    """
    figures = dict[str, dict[str, Interval]]()
    by_task = {task: [prompt for prompt in tasks if tasks[prompt] == task] for task in tasks.values()}
    for task, prompts in ({ALL: list(tasks)} | (by_task if len(by_task) > 1 else {})).items():
        rows = [np.array([held[prompt] for prompt in prompts or held]).T for held in (a, b)]
        for name in FIGURES if task == ALL else [ACCEPTANCE]:
            figures[name if task == ALL else f"{name}, {task}"] = _compared(
                *FIGURES[name], *rows, is_paired=bool(tasks)
            )
    return figures


def _held_out(profile: DecodingProfile) -> HeldOut:
    return {
        run.prompt_sha256: [run.new_tokens - 1, run.rounds, run.decode_ms, ms * (run.new_tokens - 1)]
        for run, ms in zip(profile.evidence.prompts, profile.evidence.plain_token_ms, strict=False)
        if run.new_tokens > 1
    }


def _throughputs(profile: DecodingProfile) -> dict[str, Interval]:
    """Throughputs of the chosen settings, by the number of requests at once."""
    loads = profile.evidence.engine.loads if profile.evidence.engine else []
    return {f"tokens/s, {load.at_once} at once": load.chosen.tokens_per_second for load in loads}


def _compared(above: list[int], below: list[int], a: Floats, b: Floats, *, is_paired: bool) -> dict[str, Interval]:
    """A figure by its quantities above and below the line, of quantities [4, prompts] of A and B."""
    figure = _unpaired(*(_estimate(held[above], held[below]) for held in (a, b)))
    if is_paired:
        figure[RATIO] = _estimate(np.concatenate([b[above], a[below]]), np.concatenate([b[below], a[above]]))
    return figure


def _unpaired(a: Interval, b: Interval) -> dict[str, Interval]:
    return {A: a, B: b, RATIO: (b[0] / a[0], b[1] / a[2], b[2] / a[1])}


def _estimate(above: Floats, below: Floats) -> Interval:
    low, high = bootstrap_product(list(above), list(below))
    return float(np.prod(above.sum(1)) / np.prod(below.sum(1))), low, high
