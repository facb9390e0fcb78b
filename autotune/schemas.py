"""JSON Schemas of all documents."""

from __future__ import annotations

from typing import Any

from autotune.check.result import CheckResult
from autotune.cost.roofline import DatasheetLimits
from autotune.cost.table import CostTable
from autotune.doctor.diagnosis import Diagnosis
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.search_space import SearchSpace
from autotune.drafters.checkpoint import CONFIGS
from autotune.evaluation.profile_difference import ProfileDifference
from autotune.files import Document
from autotune.replay.trace import TraceHeader
from autotune.study.document import StudyDocument
from autotune.training.recipe import Recipe

DOCUMENTS: tuple[type[Document], ...] = (
    DecodingProfile,
    CostTable,
    TraceHeader,
    StudyDocument,
    CheckResult,
    ProfileDifference,
    SearchSpace,
    Recipe,
    DatasheetLimits,
    Diagnosis,
)


def json_schemas() -> dict[str, dict[str, Any]]:
    """JSON Schema of every kind of document, by kind. Drafts have one per network: ``draft-star``."""
    drafts = {f"draft-{name}": config.json_schema() for name, config in CONFIGS.items()}
    return {document.schema_kind: document.json_schema() for document in DOCUMENTS} | drafts
