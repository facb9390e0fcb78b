"""The documents of a search, found again from the profile that it wrote: a cost table, and traces of drafts along the
answers to its tuning prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from autotune.acceptance.trace import Trace, TraceHeader, load_trace
from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.study.folder import StudyFolder, studies_beside, study_of

EAGLE3 = "eagle3"
INDEPENDENT = "independent"


@dataclass(frozen=True)
class Study:
    """What of a folder speaks of a profile: of its target, device and precision, and of its tuning prompts."""

    folder: Path
    table: CostTable
    headers: dict[Path, TraceHeader]
    """Of traces that the table prices, by file."""
    _loaded: dict[Path, Trace] = field(default_factory=dict, init=False, repr=False)

    @property
    def drafts(self) -> dict[str, str]:
        """Kinds of the drafts that were recorded, by id, as traces tell them."""
        return {header.draft.id: kind_of(header) for header in self.headers.values()}

    def trace(self, draft: ModelReference, subnet: Subnet) -> Trace | None:
        """Of these weights and this subnet; None: it was not recorded."""
        for path, header in self.headers.items():
            if header.draft.is_same(draft) and header.subnet == subnet:
                return self._load(path)
        return None

    def whole(self, draft: str) -> Trace | None:
        """Of all of a draft, as an engine runs it: every head, and every visual token where prompts have any."""
        for path, header in sorted(self.headers.items(), key=lambda item: -item[1].visual_keep):
            if header.draft.id != draft or header.subnet.head_shares != (1.0, 1.0, 1.0):
                continue
            trace = self._load(path)
            if header.visual_keep == 1.0 or not trace.num_visual_tokens.any():
                return trace
        return None

    def _load(self, path: Path) -> Trace:
        if path not in self._loaded:
            self._loaded[path] = load_trace(path)
        return self._loaded[path]


def kind_of(header: TraceHeader) -> str:
    """What kind of draft a trace is of, as far as it tells: those of this project read one of the target's layers, EAGLE-3
    heads read several, independent models none.
    """
    if not header.aux_layers:
        return INDEPENDENT
    return EAGLE3 if len(header.aux_layers) > 1 else "feature-reading"


def find_studies(profile: DecodingProfile, source: Path, folder: Path | None) -> list[Study]:
    """Those of ``folder``; without one, of ``.autotune`` beside the profile and here. There is one for every cost table, the
    newest first.

    Raises:
        UserError: there are none, or a document of ``folder`` cannot be read.
    """
    if folder is None:
        folders = studies_beside(profile, source)
    elif not folder.is_dir():
        raise UserError(f"--study {folder}: no such folder; name the one that autotune search wrote its study to")
    else:
        folders = [found] if (found := study_of(profile, folder)) is not None else []
    studies = [study for found in folders for study in _priced(found)]
    if not studies:
        where = str(folder) if folder else " or ".join(dict.fromkeys([f"{source.parent / WORKSPACE}", f"{WORKSPACE}"]))
        raise UserError(
            f"{source}: an export replays the documents of the profile's search, and {where} holds no cost table and traces of "
            f"its target, device and tuning prompts; name the study's folder with --study, or run autotune search again"
        )
    return studies


def _priced(found: StudyFolder) -> Iterator[Study]:
    for table in found.tables:
        headers = {path: one for path, one in found.headers.items() if table.holds(one.draft, one.subnet)}
        if headers:
            yield Study(found.path, table, headers)
