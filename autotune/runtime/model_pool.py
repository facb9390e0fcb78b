"""A target and the drafts that compete for it, loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autotune.console import Console
from autotune.documents.configuration import Configuration, DraftVariant
from autotune.documents.draft_kinds import TOKEN_DRAFTS
from autotune.documents.execution import EAGER, STEPS_VERSION, capture_sizes_for
from autotune.documents.provenance import ModelReference
from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.drafters.cached_draft import as_cached
from autotune.drafters.checkpoint import LoadedDraft, load_draft
from autotune.errors import UserError
from autotune.files import content_key
from autotune.machine.device import fingerprint, free_memory, usable_threads
from autotune.machine.worker_pool import MAX_WORKERS, WorkerPool
from autotune.modeling.host import limited_threads
from autotune.modeling.loading import META, Dtype, load_processor, reference
from autotune.modeling.quantization import quantization_versions, weight_bytes
from autotune.modeling.sharded import load_target
from autotune.runtime.answer_keys import SOFTWARE, AnswerKeys
from autotune.runtime.decoder import Decoder
from autotune.runtime.preparation import decoding_mode
from autotune.study.search_settings import SearchSettings

MEMORY_SHARE = 0.5  # of the free memory, for workers
PROCESS_BYTES = 1 << 30  # of a worker in addition to its weights: torch, and processed prompts


def _run_task(
    rank: int, arguments: tuple[Any, ...], num_cores: int, num_threads: int, task: Callable[..., object], *further: Any
) -> None:
    """Load the models of a pool with these ``arguments`` in a worker, and run ``task``.

    The pool sees the main process's ``num_cores`` threads, which are part of the device's fingerprint and so of the
    keys of documents; the task runs on ``num_threads``.
    """
    torch.set_num_threads(num_cores)
    model_pool = ModelPool(*arguments)
    torch.set_num_threads(num_threads)
    task(model_pool, rank, *further)


class ModelPool:
    """A target and the drafts that compete for it; subnets of the drafts are loaded on first use."""

    def __init__(
        self,
        target: str,
        drafts: Sequence[str],
        device: str,
        capture_sizes: Sequence[int] = (),
        mode: str = EAGER,
        dtype: Dtype | None = None,
        *,
        random_weights: bool = False,
        sizes_alone: bool = False,
        console: Console | None = None,
        leaves_out: bool = False,
    ) -> None:
        """``dtype`` and ``console`` as in ``load_model``, of the target; ``random_weights`` of the target and the
        drafts. Workers know neither ``random_weights`` nor ``console``.

        Args:
            sizes_alone: make models of their configs, which have sizes and decode nothing, as of the ``device``.
            leaves_out: leave a draft out that cannot be loaded or does not fit, with a line to ``console``.

        Raises:
            UserError: the target cannot be loaded, or a draft cannot or does not fit.
        """
        self.num_cores = usable_threads()
        random_weights = random_weights or sizes_alone
        self.target_reference = reference(target, weights=not random_weights)
        self._random_weights = random_weights
        self.device_name = device
        self.processor = load_processor(target, or_bundled=random_weights)
        options: dict[str, Any] = {"dtype": dtype, "random_weights": random_weights, "console": console}
        self.target = load_target(target, device=META if sizes_alone else device, **options)
        self.answer_keys = AnswerKeys(self.target, self.processor)
        self.device = fingerprint(device)
        self._subnets: dict[DraftVariant, LoadedDraft] = {}
        self.drafts: dict[str, LoadedDraft] = {}
        """Whole drafts by id, in the user's order."""
        self.references: dict[str, ModelReference] = {}
        """Drafts by id, in the user's order."""
        for name in drafts:
            try:
                self._add(name, capture_sizes)
            except UserError as error:
                if not leaves_out or name in TOKEN_DRAFTS:
                    raise
                if console is not None:
                    console.say(f"left out   {error}")
        self.arguments = target, tuple(self.references), device, tuple(capture_sizes), mode, dtype
        self.mode = decoding_mode(mode, self.target, self.drafts.values())
        self.capture_sizes = capture_sizes_for(self.mode, capture_sizes)

    def _add(self, name: str, capture_sizes: Sequence[int]) -> None:
        draft_reference = reference(name, weights=not self._random_weights)
        draft = load_draft(name, self.target, random_weights=self._random_weights)
        # A decoder checks that the vocabularies agree.
        Decoder(self.target, draft, capture_sizes=capture_sizes, mode=EAGER, processor=self.processor)
        self.references[draft_reference.id], self.drafts[draft_reference.id] = draft_reference, draft

    @contextmanager
    def worker_pool(
        self, jobs: int | None, task: Callable[..., object], *arguments: Any, deadline: float
    ) -> Iterator[WorkerPool]:
        """A pool of workers that load the same models and run ``task(model_pool, rank, *arguments)`` until
        ``deadline``, ``jobs`` processes in all (None: one per core), which share torch's threads.
        """
        num_workers, num_threads = self.worker_limits(jobs)
        given = self.arguments, self.num_cores, num_threads, task, *arguments
        pool = WorkerPool(num_workers, _run_task, *given, deadline=deadline)
        with pool, limited_threads(num_threads):
            yield pool

    def worker_limits(self, jobs: int | None) -> tuple[int, int]:
        """Number of workers in addition to this process, and of CPU threads for each, as far as memory allows; no
        workers on an accelerator, or where other processes hold parts of the target.
        """
        if self.device_name != "cpu" or self.target.ranks is not None:
            return 0, self.num_cores
        own_bytes = self.target_bytes + self.draft_bytes + PROCESS_BYTES
        num_fitting = 1 + int(MEMORY_SHARE * free_memory("cpu") / own_bytes)
        num_workers = min(min(jobs or self.num_cores, num_fitting) - 1, MAX_WORKERS)
        return num_workers, max(1, self.num_cores // (1 + num_workers))

    @property
    def target_bytes(self) -> int:
        """Bytes of the target's weights."""
        return weight_bytes(self.target.model)

    @property
    def draft_bytes(self) -> int:
        """Bytes of the weights of all drafts."""
        return sum(draft.weight_bytes for draft in self.drafts.values())

    def draft(self, draft: str, subnet: Subnet | None = None) -> LoadedDraft:
        """A draft with the heads, injection layer, vocabulary, weights and operator of a subnet; its visual tokens are
        selected per prompt.

        Raises:
            UserError: the draft has no such subnet.
        """
        full = self.drafts[draft]
        subnet = subnet or full.subnet
        layer = subnet.injection_layer or full.subnet.injection_layer
        fixed = {"injection_layer": layer, "visual_keep": 1.0, "visual_ranking": Subnet().visual_ranking}
        subnet = subnet.model_copy(update=fixed)
        if subnet.network == full.subnet.network:
            return full
        if (draft, subnet) not in self._subnets:
            self._subnets[draft, subnet] = load_draft(draft, self.target, subnet, random_weights=self._random_weights)
        return self._subnets[draft, subnet]

    def plain_decoder(self, threads: int | None = None, prefill_threads: int | None = None) -> Decoder:
        """Decodes with the target alone, on so many CPU threads; None: as many as torch uses."""
        options: dict[str, Any] = {"capture_sizes": self.capture_sizes, "mode": self.mode, "processor": self.processor}
        return Decoder(self.target, threads=threads, prefill_threads=prefill_threads, **options)

    def draft_of(self, configuration: Configuration) -> LoadedDraft:
        """The draft of a configuration; the first one if it names none."""
        return self.draft(configuration.draft or next(iter(self.drafts)), configuration.subnet)

    @property
    def has_states(self) -> bool:
        """Whether the target or a draft keeps recurrent or convolution states, so that only chains are decoded."""
        return self.target.has_states or any(draft.has_states for draft in self.drafts.values())

    @property
    def key(self) -> str:
        """Content key of the models' weights, the device, the versions of this program and its libraries, and the
        mode, captured ones with the version of their steps: part of the key of every document. Prompts have
        ``answer_keys``.
        """
        models = [model.sha256 or model.id for model in (self.target_reference, *self.references.values())]
        documents: list[object] = [*models, self.target.text.precision, self.device.key, SOFTWARE]
        documents += [list(self.capture_sizes)] if self.capture_sizes else []
        documents += [self.mode, STEPS_VERSION] if self.mode != EAGER else []
        documents += quantization_versions(self.target.text.quantization)
        cached = {id: as_cached(draft) for id, draft in self.drafts.items()}
        documents += [id for id, draft in cached.items() if draft is not None and draft.ranks is not None]
        return content_key(documents)


def load_pool(
    settings: SearchSettings, device: str, console: Console, *, mode: str | None = None, sizes_alone: bool = False
) -> ModelPool:
    """The target and the drafts of the settings. Default drafts that do not fit the target are left out.

    Args:
        mode: None: that of the settings.
        sizes_alone: as in ``ModelPool``.
    """
    return ModelPool(
        settings.target,
        settings.drafts,
        device,
        settings.capture_sizes,
        mode or settings.mode,
        settings.dtype,
        random_weights=settings.random_weights,
        sizes_alone=sizes_alone,
        console=console,
        leaves_out=settings.has_default_drafts,
    )


def variants_of(pool: ModelPool, space: SearchSpace) -> list[DraftVariant]:
    """All variants of a space: its subnets of every draft of a pool. Heads and layers of a space apply to supernets.
    Drafts that see no images have no visual tokens to choose.

    Raises:
        UserError: the space has no whole draft in a dimension that no draft has.
    """

    dimensions = [draft.dimensions for draft in pool.drafts.values()]
    is_supernet = any(known.injection_layers for known in dimensions)
    choices = [
        ("heads", 1.0 in space.heads, is_supernet),
        ("injection layers", not isinstance(space.injection_layers, list), is_supernet),
        ("operators", "gate" in space.operators, any(known.operators for known in dimensions)),
        ("vocabularies", 1.0 in space.vocabularies, any(known.has_vocabularies for known in dimensions)),
        ("weights", "unchanged" in space.weights, any(known.has_float8 is not None for known in dimensions)),
    ]
    for what, has_whole, is_choosable in choices:
        if not has_whole and not is_choosable:
            raise UserError(f"none of {', '.join(pool.drafts)} has {what} to choose; leave {what} out")
    blind = space.without_images()
    return [
        (id, subnet)
        for id, draft in pool.drafts.items()
        for subnet in (space if draft.sees_images else blind).subnets(id, draft.subnet, *draft.dimensions)
    ]
