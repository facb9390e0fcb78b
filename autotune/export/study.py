"""The documents of a search, found again from the profile that it wrote: a cost table, and traces of drafts along the
answers to its tuning prompts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from autotune.acceptance.trace import Trace, TraceHeader, load_trace
from autotune.cost.table import CostTable, load_table
from autotune.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.files import parse, read_json
from autotune.provenance import ModelReference
from autotune.subnet import Subnet

STUDIES = Path(".autotune")  # where searches keep theirs
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
            if _is_same(header.draft, draft) and header.subnet == subnet:
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
    if not header.reads:
        return INDEPENDENT
    return EAGLE3 if len(header.reads) > 1 else "feature-reading"


def find_studies(profile: DecodingProfile, source: Path, folder: Path | None) -> list[Study]:
    """Those of ``folder``; without one, of ``.autotune`` beside the profile and here, where studies that cannot be read, older
    ones say, are passed over. There is one for every cost table, the newest of a folder first.

    Raises:
        UserError: there are none, or a document of ``folder`` cannot be read.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"--study {folder}: no such folder; name the one that autotune search wrote its study to")
    roots = [source.parent / STUDIES, STUDIES]
    if folder is not None:
        found = _studies(profile, folder)
    else:
        beside = {path.resolve(): path for root in roots if root.is_dir() for path in sorted(root.iterdir())}
        found = []
        for path in beside.values():
            with suppress(UserError):
                found += _studies(profile, path)
    if not found:
        where = str(folder) if folder else " or ".join(dict.fromkeys(map(str, roots)))
        raise UserError(
            f"{source}: an export replays the documents of the profile's search, and {where} holds no cost table and traces of "
            f"its target, device and tuning prompts; name the study's folder with --study, or run autotune search again"
        )
    return found


def _studies(profile: DecodingProfile, folder: Path) -> list[Study]:
    tables = [
        table
        for path in sorted(folder.glob("*.cost.json"), key=lambda path: -path.stat().st_mtime)
        if _is_same((table := load_table(path)).target, profile.target)
        and table.device.key == profile.hardware.key
        and table.precision == profile.precision
    ]
    if not tables:
        return []
    weights = {point.draft.id: point.draft.sha256 for point in profile.points if point.draft is not None}
    headers = {
        path: header
        for path in sorted(folder.glob("traces/*/*.trace.json"))
        if _is_same((header := parse(TraceHeader, "trace", read_json(path), source=path)).target, profile.target)
        and header.workload_sha256 == profile.workload.tune_sha256
        and header.draft.sha256 == weights.get(header.draft.id, header.draft.sha256)
    }
    studies = []
    for table in tables:
        priced = {path: header for path, header in headers.items() if table.holds(header.draft, header.subnet)}
        if priced:
            studies.append(Study(folder, table, priced))
    return studies


def _is_same(one: ModelReference, other: ModelReference) -> bool:
    """Without a hash the name decides."""
    return one.sha256 == other.sha256 and bool(one.sha256 or one.id == other.id)
