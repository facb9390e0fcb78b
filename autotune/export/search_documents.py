"""The cost table and traces of the search that wrote a profile, and the predictions that replay makes from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from autotune.acceptance.replay import Replay, plain_decode_ms, replay
from autotune.acceptance.trace import Trace, TraceHeader, load_trace
from autotune.cost.table import CostTable
from autotune.documents.configuration import configuration_of
from autotune.documents.decoding_profile import DecodingProfile, OperatingPoint, Predicted
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import VisualInput
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.prediction.evaluator import Evaluator
from autotune.study.folder import find_studies, find_study
from autotune.trees.chain import ChainPolicy
from autotune.trees.limits import Floats


@dataclass(frozen=True)
class SearchDocuments:
    """One cost table of a study folder, and the traces that it prices, for a profile's target, device, precision and
    tuning prompts.
    """

    folder: Path
    table: CostTable
    headers: dict[Path, TraceHeader]
    """Trace headers by file."""
    _evaluators: dict[Path, Evaluator] = field(default_factory=dict, init=False, repr=False)

    def engine_trace(self, draft: str, vision: VisualInput) -> Trace | None:
        """The trace of a draft as an engine runs it, with every head; None if it was not recorded. A trace of prompts
        without images serves every engine.
        """
        for path, header in self.headers.items():
            if header.draft.id != draft or header.subnet.head_shares != (1.0, 1.0, 1.0):
                continue
            (trace,) = self._evaluator(path).traces.values()
            is_shown = header.visual_input == vision and header.subnet.visual_keep == 1.0
            if is_shown or not trace.num_visual_tokens.any():
                return trace
        return None

    def predict(self, point: OperatingPoint, trace: Trace) -> Predicted:
        """Predict a point; without the point's own trace, return the profile's prediction. ``trace`` is any trace of
        the same prompts, along which plain decoding is priced.

        Raises:
            UserError: neither the study nor the profile has a prediction of the point.
        """
        if point.draft is None:
            ms = Evaluator([trace], self.table).ar_ms_per_token
            return Predicted(speedup=1.0, ms_per_token=ms, tokens_per_round=None, estimated=self.table.estimated)
        if (replayed := self._replay(point)) is None:
            if point.predicted is None:
                raise UserError(
                    f"{self.folder} has no trace of {point.draft.id} {point.draft.subnet.label}".strip()
                    + ", and the profile has no prediction of its point; run autotune search again"
                )
            return point.predicted
        evaluator, result = replayed
        return prediction(result, evaluator.ar_ms, is_estimated=self.table.estimated)

    def reproduces(self, point: OperatingPoint) -> bool | None:
        """Whether replay repeats the profile's prediction of a point, as it does with the documents of the profile's
        own search; None if one of the two predictions is missing.
        """
        if point.predicted is None or (replayed := self._replay(point)) is None:
            return None
        evaluator, result = replayed
        times = [result.ms_per_token, evaluator.ar_ms_per_token / result.ms_per_token]
        return bool(np.allclose(times, [point.predicted.ms_per_token, point.predicted.speedup], rtol=1e-9))

    def _evaluator(self, path: Path) -> Evaluator:
        if path not in self._evaluators:
            self._evaluators[path] = Evaluator([load_trace(path)], self.table)
        return self._evaluators[path]

    def _replay(self, point: OperatingPoint) -> tuple[Evaluator, Replay] | None:
        """The evaluator of a point's own trace, and the point's replay; None for plain decoding or without a trace."""
        configuration = configuration_of(point)
        if configuration is None or point.draft is None:
            return None
        draft = ModelReference(id=point.draft.id, sha256=point.draft.sha256)
        for path, header in self.headers.items():
            is_own = header.draft.is_same(draft) and header.subnet == point.draft.subnet
            if is_own and header.visual_input == "features":
                evaluator = self._evaluator(path)
                return evaluator, evaluator.replay(configuration)
        return None


def find_search_documents(profile: DecodingProfile, source: Path, folder: Path | None) -> list[SearchDocuments]:
    """Documents for each cost table of ``folder``, newest first; without a folder, of the studies in ``.autotune`` next
    to the profile and in the working directory.

    Raises:
        UserError: nothing was found, or a document of ``folder`` cannot be read.
    """
    if folder is None:
        folders = find_studies(profile, source)
    elif not folder.is_dir():
        raise UserError(f"--study {folder}: no such folder; give the study folder that autotune search named")
    else:
        folders = [found] if (found := find_study(profile, folder)) is not None else []
    documents = []
    for study in folders:
        for table in study.tables:
            headers = {path: h for path, h in study.headers.items() if table.holds(h.draft, h.subnet)}
            if headers:
                documents.append(SearchDocuments(study.path, table, headers))
    if not documents:
        where = str(folder) if folder else " or ".join(dict.fromkeys([f"{source.parent / WORKSPACE}", f"{WORKSPACE}"]))
        raise UserError(
            f"{source}: export replays the documents of the profile's search, and {where} holds no cost table and traces of "
            "its target, device and tuning prompts; give the study's folder with --study, or run autotune search again"
        )
    return documents


def priced_chains(trace: Trace, table: CostTable) -> dict[int, Predicted]:
    """Predictions of every chain that the trace holds and the table prices, by depth, for one request at a time. Every
    round of a chain drafts and verifies the same number of tokens, in this project's runtime as in an engine.

    Raises:
        UserError: the answers are too short to decode.
    """
    (prices,) = Evaluator([trace], table).prices.values()
    if trace.header.visual_input == "placeholders":  # the draft encodes no image
        prefill = prices.draft_prefill.model_copy(update={"image_ms": 0.0})
        prices = dataclasses.replace(prices, draft_prefill=prefill)
    plain_ms = plain_decode_ms(trace, prices)
    return {
        depth: prediction(replay(trace, ChainPolicy(depth=depth), prices), plain_ms, is_estimated=table.estimated)
        for depth in range(1, min(trace.header.bounds.depth, prices.verify_ms.shape[0] - 2) + 1)
    }


def prediction(result: Replay, plain_ms: Floats, *, is_estimated: bool) -> Predicted:
    """The prediction of a replay, with the time of plain decoding by prompt [prompts]."""
    return Predicted(
        speedup=float(plain_ms.sum() / result.decode_ms.sum()),
        ms_per_token=result.ms_per_token,
        tokens_per_round=result.tokens_per_round,
        estimated=is_estimated,
    )
