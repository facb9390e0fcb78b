"""A check of a profile of the runtime: decoded in this process, and compared with worker processes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from autotune.check.checked import CheckedBackend, Side
from autotune.check.comparison import CHECKS, require_comparable
from autotune.check.versions import PACKAGE, Version, WorkerProcess, base_of
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import TUNED, DecodingProfile
from autotune.errors import UserError
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.runtime_arms import DecoderArm, RuntimeArms
from autotune.files import content_key, sha256_of
from autotune.machine.device import choose_device, fingerprint
from autotune.modeling.ranks import joined
from autotune.modeling.weight_files import save_tensors
from autotune.runtime.load import load
from autotune.workloads.workload import Workload

# Files that a side decodes with: the package, and the bundled models next to it or, if installed, inside it.
CODE = ("autotune/**/*.py", "drafts/**/*.safetensors", "drafts/**/*.json", "autotune/_data/drafts/**/*.safetensors")
CHOICES = {"point", "mode", "capture_sizes", "threads", "prefill_threads", "precision", "target"}
"""Fields of a profile from which the speed follows."""


class CheckedRuntime(CheckedBackend):
    def load(self) -> None:
        settings = self.settings
        if settings.against and joined() is not None:
            raise UserError(
                "--against decodes in processes of one device; leave it out, or start the check without torchrun"
            )
        self.decoder = load(
            settings.profile, device=choose_device(settings.device), dtype=settings.dtype, console=self.console
        )
        self.made = RuntimeArms(self.decoder)
        self.tuned = self.made.plain if self.decoder.draft is None else DecoderArm(TUNED, self.decoder, self.made)
        self.arms = [self.made.plain, self.tuned]
        self.precision = self.decoder.target.text.precision
        self.hardware = fingerprint(str(self.decoder.target.device))
        self.rounding = "" if self.precision == "float32" else f"near ties in {self.precision}"

    def close(self) -> None:
        del self.decoder, self.made, self.tuned, self.arms
        gc.collect()
        torch.cuda.empty_cache()

    def prepared(self, workload: Workload) -> Workload:
        fitting = workload.fitting(self.decoder.processor, self.decoder.target.max_context, self.console.say)
        prepared = self.made.conversations.follow_workload(fitting)
        for prompt in prepared.prompts if self.settings.against else ():
            save_tensors(self.inputs / f"{prompt.sha256}.safetensors", prompt.inputs(self.decoder.processor))
        return prepared

    def differences(
        self, workload: Workload, runs: Sequence[Decoded], plain: Sequence[Decoded]
    ) -> tuple[dict[str, str], bool]:
        divergences = divergences_from_plain(self.tuned, workload.prompts, runs, plain)
        is_rounding = all(where.is_near_tie for where in divergences.values())
        return {prompt: str(where) for prompt, where in divergences.items()}, is_rounding

    @contextmanager
    def sides(self, folder: Path) -> Iterator[tuple[Side, Side]]:
        settings, self.inputs = self.settings, folder
        head = Version("head", "the current version", settings.profile)
        with base_of(str(settings.against), settings.profile, folder, with_code=True) as base:
            if base.code == PACKAGE:
                head = Version("head", str(settings.profile), settings.profile)
            require_comparable(DecodingProfile.load(base.profile), self.profile, base.label)
            CHECKS.mkdir(parents=True, exist_ok=True)
            yield self._side(base), self._side(head)

    def _side(self, version: Version) -> Side:
        document, dtype = DecodingProfile.load(version.profile), self.settings.dtype
        code = sha256_of(*sorted(path for pattern in CODE for path in version.code.glob(pattern)))
        choices = document.model_dump(mode="json", include=CHOICES, exclude={"point": {"predicted", "measured"}})
        options = {"device": choose_device(self.settings.device)} | ({} if dtype is None else {"dtype": dtype})
        return Side(
            version.label,
            content_key([code, dtype, version.python == sys.executable, choices]),
            document,
            partial(WorkerProcess, version, self.inputs, options, log=CHECKS / f"{version.name}.log"),
        )
