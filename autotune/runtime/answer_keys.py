"""Keys of a target's answers, by which recorded ones are found again."""

from __future__ import annotations

import json
from typing import Any

from autotune.documents.provenance import DISTRIBUTION, version_of
from autotune.files import content_key
from autotune.modeling.target import Target
from autotune.workloads.prompt import WorkloadPrompt, hash_inputs
from autotune.workloads.workload import Workload

SOFTWARE = tuple(version_of(package) for package in (DISTRIBUTION, "torch", "transformers"))
"""Versions of the programs that compute answers."""
SET_BY_PROMPTS = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "max_length")
"""Settings of a generation config that every prompt replaces."""
OF_SAMPLING = ("min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
"""Settings that change sampled answers only."""
WITHOUT_EFFECT = ("transformers_version", "pad_token_id", "bos_token_id", "use_cache")


class AnswerKeys:
    """Keys of one target's answers: hashes of the token ids and pixels of prompts and of the effective generation
    settings. A file of the model that has changed gives other keys to the answers that it changes, and to no others.
    The target's weights are not part of a key.
    """

    def __init__(self, target: Target, processor: Any) -> None:
        self._config = target.model.generation_config
        self.processor = processor
        self._known: dict[tuple[str, tuple[str, ...]], str] = {}

    def of(self, prompt: WorkloadPrompt) -> str:
        """The key of the answer to a prompt."""
        content = prompt.sha256, prompt.answers
        if content not in self._known:
            inputs = hash_inputs(prompt.with_all_answers.inputs(self.processor))
            self._known[content] = content_key([inputs, prompt.settings.generation, self.settings_of(prompt)])
        return self._known[content]

    def of_workload(self, workload: Workload) -> str:
        """A key of the answers to all prompts, with their tasks."""
        return content_key([[self.of(prompt), prompt.settings.task] for prompt in workload.prompts])

    def settings_of(self, prompt: WorkloadPrompt) -> dict[str, Any]:
        """The settings of the generation config that this prompt does not replace."""
        left_out = {*SET_BY_PROMPTS, *WITHOUT_EFFECT, *(() if prompt.settings.temperature > 0 else OF_SAMPLING)}
        settings = json.loads(self._config.to_json_string(use_diff=True))
        return {name: value for name, value in settings.items() if name not in left_out}
