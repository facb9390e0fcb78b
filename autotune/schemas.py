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
    """JSON Schema of every kind of document, by kind. Drafts have one per network: ``draft-star``.

    Its ``$id`` names kind and version, ``urn:autotune-speculative:decoding-profile:2``: it stays while files of that
    version are read, and is no address. ``documents/schemas/`` has them as files.
    """
    kinds = {
        **{document.schema_kind: document for document in DOCUMENTS},
        **{f"draft-{name}": config for name, config in CONFIGS.items()},
    }
    return {
        kind: {"$id": f"urn:autotune-speculative:{kind}:{document.schema_version}", **document.json_schema()}
        for kind, document in kinds.items()
    }
