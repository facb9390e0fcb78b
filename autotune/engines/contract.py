"""Tests that every backend passes, for the authors of others: inherit the class in a module of tests, and give it the
backend. Needs pytest.

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def backend(self) -> MyBackend: ...

        @pytest.fixture
        def prompts(self) -> list[WorkloadPrompt]: ...
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from autotune.documents.decoded import Decoded
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend
from autotune.workloads.prompt import WorkloadPrompt


class BackendContract:
    """A subclass has the fixtures ``backend``, and ``prompts``: at least three, of which one is answered with more than
    two tokens.
    """

    @pytest.fixture
    def recorded(self, backend: Backend, prompts: Sequence[WorkloadPrompt]) -> Any:
        return backend.record(prompts)

    def chosen(self, backend: Backend, left_out: Collection[str] = ()) -> list[Speculation]:
        """The default of every type, and another configuration of it."""
        configurations = [
            configuration for configuration in reversed(backend.configurations()) if configuration.type not in left_out
        ]
        return list(
            {(configuration.type, configuration.is_default): configuration for configuration in configurations}.values()
        )

    def test_configurations_have_keys_and_labels_of_their_own_and_every_type_a_default(self, backend: Backend) -> None:
        configurations = backend.configurations()
        assert (
            len({configuration.key for configuration in configurations})
            == len({configuration.label for configuration in configurations})
            == len(configurations)
            > 0
        )
        assert {configuration.type for configuration in configurations if configuration.is_default} == {
            configuration.type for configuration in configurations
        }

    def test_plain_answers_are_recorded_once_in_the_order_of_the_prompts(
        self, backend: Backend, prompts: Sequence[WorkloadPrompt], recorded: Any
    ) -> None:
        assert [answer.prompt_sha256 for answer in recorded.answers] == [prompt.sha256 for prompt in prompts]
        assert all(0 < answer.new_tokens == len(answer.tokens) for answer in recorded.answers)
        assert [answer.tokens for answer in backend.record(prompts).answers] == [
            answer.tokens for answer in recorded.answers
        ]

    def test_replay_is_deterministic_and_plain_decoding_drafts_nothing(self, backend: Backend, recorded: Any) -> None:
        for configuration in self.chosen(backend):
            assert backend.replay(configuration, recorded).counts == backend.replay(configuration, recorded).counts
        assert set(backend.replay(None, recorded).counts) == {(0, 0, 0)}

    def test_prices_are_positive_times_of_each_prompt(self, backend: Backend, recorded: Any) -> None:
        prices = backend.price(recorded)
        for configuration in (None, *self.chosen(backend, prices.left_out)):
            ms = prices.ms(backend.replay(configuration, recorded))
            assert ms.shape == (len(recorded.answers),) and np.isfinite(ms).all() and (ms >= 0).all() and ms.sum() > 0

    def test_arms_have_the_counts_of_the_replay(
        self, backend: Backend, prompts: Sequence[WorkloadPrompt], recorded: Any
    ) -> None:
        """In the prompts' order, and of an arm that keeps no state in any order; an arm's answers are plain decoding's,
        and carry the arm's key.
        """
        for configuration in (None, *self.chosen(backend, backend.price(recorded).left_out)):
            with backend.arm(configuration) as arm:
                arm.prepare(prompts)
                answers = [arm.decode(prompt) for prompt in prompts]
                again = [] if arm.keeps_state else [arm.decode(prompt) for prompt in reversed(prompts)]
            counts = list(backend.replay(configuration, recorded).counts)
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in recorded.answers], (
                configuration
            )
            assert [answer.draft_counts for answer in answers] == counts, configuration
            assert arm.keeps_state is True or [answer.draft_counts for answer in again] == counts[::-1], configuration
            assert all(
                type(answer) is Decoded and answer.arm == arm.key and answer.decode_ms >= 0 for answer in answers
            )
            assert [answer.prompt for answer in answers] == [prompt.name for prompt in prompts]

    def test_arms_are_told_apart_by_their_names_and_keys(self, backend: Backend) -> None:
        arms = []
        for configuration in [None, backend.configurations()[0]] * 2:
            with backend.arm(configuration) as arm:
                arms.append((arm.name, arm.key))
        plain, other = arms[:2]
        assert arms[2:] == [plain, other] and plain[0] != other[0] and plain[1] != other[1]

    def test_the_deployed_command_names_the_model_and_the_speculation(self, backend: Backend) -> None:
        chosen = backend.configurations()[-1]
        plain, tuned = backend.deploy(None), backend.deploy(chosen)
        assert plain.backend == tuned.backend == backend.name and plain.model == backend.model
        assert plain.speculation is None and tuned.speculation is not None and plain.command != tuned.command
        assert plain.command == [word for word in tuned.command if word in plain.command]
