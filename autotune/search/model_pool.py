"""A target and the drafts that contend for it, with what documents call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autotune.device import fingerprint, free_memory
from autotune.documents.configuration import Configuration, DraftVariant
from autotune.documents.provenance import ModelReference, version_of
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import LoadedDraft, load_draft
from autotune.drafters.feature_draft import FeatureDraft
from autotune.errors import UserError
from autotune.evaluation.runner import ArmRunner
from autotune.execution import EAGER, capture_sizes_for
from autotune.files import content_key
from autotune.modeling.graph_runner import check_mode
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.modeling.threads import limited_threads
from autotune.runtime.decoder import Decoder
from autotune.search.space import SearchSpace
from autotune.search.worker_pool import MOST_HELPERS, WorkerPool

SHARE_OF_MEMORY = 0.5  # of what is free, that helpers may take
BYTES_OF_PROCESS = 1 << 30  # torch, and what is kept of prompts


class Asked(NamedTuple):
    """What contenders are loaded from, for a process that loads the same."""

    target: str
    drafts: tuple[str, ...]
    device: str
    capture_sizes: tuple[int, ...]
    mode: str
    threads: int
    """That torch used then: part of the device's fingerprint, and so of every document's name."""


def _as_helper(rank: int, asked: Asked, threads: int, task: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """In a process of its own."""
    torch.set_num_threads(asked.threads)
    model_pool = ModelPool(asked.target, asked.drafts, asked.device, asked.capture_sizes, asked.mode)
    torch.set_num_threads(threads)
    task(model_pool, rank, *arguments)


class ModelPool:
    """The target and the drafts that contend for it, loaded when first asked for."""

    def __init__(
        self, target: str, drafts: Sequence[str], device: str, capture_sizes: Sequence[int] = (), mode: str = EAGER
    ) -> None:
        """Raises:
        UserError: a model that cannot be loaded, or no draft for this target.
        """
        self.asked = Asked(target, tuple(drafts), device, tuple(capture_sizes), mode, torch.get_num_threads())
        self.target_reference = reference(target)
        self.processor = load_processor(target)
        self.target = Target(load_model(target, device=device))
        self.mode = check_mode(mode, self.target.device)
        self.capture_sizes = capture_sizes_for(mode, capture_sizes)
        self.device = fingerprint(device)
        self._loaded: dict[DraftVariant, LoadedDraft] = {}
        self._wholes: dict[str, LoadedDraft] = {}
        self.references: dict[str, ModelReference] = {}
        """Of the drafts, by their ids."""
        for name in drafts:
            found = reference(name)
            self.references[found.id] = found
            whole = load_draft(name, self.target)
            Decoder(
                self.target, whole, capture_sizes=self.capture_sizes, processor=self.processor
            )  # checks that vocabularies agree
            self._wholes[found.id] = whole

    @contextmanager
    def helped(self, jobs: int | None, task: Callable[..., None], *arguments: Any) -> Iterator[WorkerPool]:
        """Inside, processes that have loaded the same models may run ``task(model_pool, rank, *arguments)`` beside this one,
        ``jobs`` in all (None: one for each core); the threads are shared out among them.
        """
        number, threads = self.room_for_helpers(jobs)
        with WorkerPool(number, _as_helper, self.asked, threads, task, arguments) as helpers, limited_threads(threads):
            yield helpers

    def room_for_helpers(self, jobs: int | None) -> tuple[int, int]:
        """How many more processes may work with these models at once, and on how many CPU threads each: ``jobs`` in all
        (None: one for each thread that torch uses) as far as memory goes; none where an accelerator works.
        """
        cores = self.asked.threads
        jobs = jobs or cores
        if self.target.device.type != "cpu":
            return 0, cores
        drafts = [draft.num_parameters for draft in self._wholes.values()]
        weights = (self.target.model.num_parameters() + sum(drafts)) * self.target.dtype.itemsize
        free = free_memory(self.target.device)
        if free is not None:
            jobs = min(jobs, 1 + int(SHARE_OF_MEMORY * free / (weights + BYTES_OF_PROCESS)))
        number = min(jobs, 1 + MOST_HELPERS) - 1
        return number, max(1, cores // (1 + number))

    @property
    def precision(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    def kind(self, draft: str) -> str:
        """Of a draft: ``star``, ``independent``, ..."""
        return self._wholes[draft].kind

    def draft(self, draft: str, subnet: Subnet | None = None) -> LoadedDraft:
        """A draft, sliced to the heads and reading the layer of a subnet; its visual tokens are chosen prompt by prompt.

        Raises:
            UserError: a subnet that it does not have.
        """
        whole = self._wholes[draft]
        subnet = subnet or whole.subnet
        layer = subnet.injection_layer or whole.subnet.injection_layer
        wanted = Subnet(heads=subnet.heads, injection_layer=layer)
        if wanted.heads is None and layer == whole.subnet.injection_layer:
            return whole
        if (draft, wanted) not in self._loaded:
            self._loaded[draft, wanted] = load_draft(draft, self.target, wanted)
        return self._loaded[draft, wanted]

    def runner(self, threads: int | None, ledger: Path | None = None) -> ArmRunner:
        """Runs configurations of any of the drafts, with steps on so many CPU threads."""
        plain = Decoder(
            self.target, capture_sizes=self.capture_sizes, mode=self.mode, threads=threads, processor=self.processor
        )
        return ArmRunner(plain, self.processor, ledger, context=[self.key, threads], draft_of=self.draft_of)

    def draft_of(self, configuration: Configuration) -> LoadedDraft:
        """Who drafts: the first, where a configuration names nobody."""
        return self.draft(configuration.draft or next(iter(self._wholes)), configuration.subnet)

    def subnets(self, space: SearchSpace) -> list[DraftVariant]:
        """All of a space, of every draft.

        Raises:
            UserError: the space has heads or layers to choose, and no draft has.
        """
        found: list[DraftVariant] = []
        supernets = {draft for draft, whole in self._wholes.items() if whole.kind == "star"}
        if not supernets and (space.heads != [1.0] or isinstance(space.injection_layers, list)):
            names = ", ".join(self._wholes)
            raise UserError(
                f"only a star draft has heads and layers to choose; got {names}; leave heads and layers out"
            )
        for draft, whole in self._wholes.items():
            readable: Sequence[int] = ()
            if draft in supernets:
                assert isinstance(whole, FeatureDraft)
                readable = whole.network.config.injection_layers
            found += [(draft, subnet) for subnet in space.subnets(draft, whole.subnet, readable)]
        return found

    @property
    def key(self) -> str:
        """Names documents that speak of these models on this device, through these versions."""
        models = [found.sha256 or found.id for found in (self.target_reference, *self.references.values())]
        sizes: list[object] = [list(self.capture_sizes)] if self.capture_sizes else []
        sizes += [self.mode] if self.mode != EAGER else []
        versions = [version_of("torch"), version_of("transformers")]
        return content_key([*models, self.device.key, *versions, *sizes])
