"""What a profile's points promise, replayed from their study's documents: what an engine's configuration is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.replay import Replay, plain_decode_ms
from autotune.acceptance.trace import Trace
from autotune.documents.condition import first_match
from autotune.documents.configuration import configuration_of
from autotune.documents.decoding_profile import DecodingProfile, OperatingPoint, Predicted
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError
from autotune.export.study import Study
from autotune.search.evaluator import Evaluator
from autotune.trees.tree import Floats

Mask = NDArray[np.bool_]
"""Which of the tuning prompts, [prompts]."""


def points_of(profile: DecodingProfile, trace: Trace) -> NDArray[np.int64]:
    """Which point decodes each tuning prompt, greedily, [prompts]."""
    conditions = [point.when for point in profile.points]
    prompts = zip(trace.prompt_length.tolist(), trace.header.tasks, strict=True)
    found = [first_match(conditions, temperature=0.0, prompt_tokens=n, workload=task) for n, task in prompts]
    return np.array(found)


def promise_of(study: Study, point: OperatingPoint, trace: Trace, prompts: Mask | None = None) -> Predicted:
    """A point on some of the prompts, or on all; where its own trace is not at hand, what the search said of it. ``trace`` is
    any of the same prompts: plain decoding is priced along it.

    Raises:
        UserError: neither the study nor the profile says anything of the point.
    """
    chosen = np.ones(trace.num_prompts, bool) if prompts is None else prompts
    plain_ms = float(_plain_ms(study, trace)[chosen].sum())
    estimated = study.table.estimated
    if point.draft is None:
        tokens = int((np.diff(trace.answer_start) - 1)[chosen].sum())
        return Predicted(speedup=1.0, ms_per_token=plain_ms / tokens, tokens_per_round=None, estimated=estimated)
    own = _own_trace(study, point)
    if own is None:
        if point.predicted is None:
            raise UserError(
                f"{study.folder} has no trace of {point.draft.id} {point.draft.subnet.label}, and the profile predicts nothing of its "
                "point; run autotune search again"
            )
        return point.predicted
    result = _replay(study, point, own)
    ms, tokens = float(result.decode_ms[chosen].sum()), int(result.tokens[chosen].sum())
    return Predicted(
        speedup=plain_ms / ms,
        ms_per_token=ms / tokens,
        tokens_per_round=tokens / int(result.rounds[chosen].sum()),
        estimated=estimated,
    )


def keeps_promise(study: Study, point: OperatingPoint) -> bool | None:
    """Whether the study's documents predict of a point what the profile says: they are those of its search. None: one of the
    two says nothing.
    """
    own = _own_trace(study, point)
    if own is None or point.predicted is None:
        return None
    found, said = promise_of(study, point, own), point.predicted
    return bool(np.allclose([found.ms_per_token, found.speedup], [said.ms_per_token, said.speedup], rtol=1e-9))


def promise_together(study: Study, profile: DecodingProfile, trace: Trace) -> float | None:
    """Speedup of all points, each on the prompts that it decodes; None where one of them was not recorded."""
    decoded_by = points_of(profile, trace)
    plain_ms = _plain_ms(study, trace)
    ms = plain_ms.copy()
    for number in np.unique(decoded_by):
        point, prompts = profile.points[number], decoded_by == number
        if point.draft is None:
            continue
        own = _own_trace(study, point)
        if own is None:
            return None
        ms[prompts] = _replay(study, point, own).decode_ms[prompts]
    return float(plain_ms.sum() / ms.sum())


def _own_trace(study: Study, point: OperatingPoint) -> Trace | None:
    """Of the point's draft and subnet; None for plain decoding, and where it is not at hand."""
    if point.draft is None:
        return None
    return study.trace(ModelReference(id=point.draft.id, sha256=point.draft.sha256), point.draft.subnet)


def _replay(study: Study, point: OperatingPoint, trace: Trace) -> Replay:
    """As the search replayed it."""
    configuration = configuration_of(point)
    assert configuration is not None
    return Evaluator([trace], study.table).replay(configuration)


def _plain_ms(study: Study, trace: Trace) -> Floats:
    (prices,) = Evaluator([trace], study.table).prices.values()
    return plain_decode_ms(trace, prices)
