"""``autotune check`` with the profile of an engine whose times are simulated: what is found in twenty checks each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.documents.decoding_profile import DecodingProfile
from tests.check.engine_folder import autotune


def checks(engine_folder: Path, switches: str, seeds: Sequence[int], machine: float = 1.0) -> list[tuple[int, str]]:
    """Exit codes and last lines of checks of another build, on a machine that takes ``machine`` times as long."""
    results = []
    for seed in seeds:
        command = f"{engine_folder}/llama-server --seed {seed} --machine {machine} {switches}"
        done = autotune("check", "profile.json", "--engine-command", command)
        results.append((done.exit_code, done.output.splitlines()[-1]))
        print(f"seed {seed}, {switches or 'unchanged'}: exit code {results[-1][0]}, {results[-1][1]}")
    return results


@pytest.mark.parametrize("seeds", [range(1, 4), pytest.param(range(4, 21), marks=pytest.mark.nightly)])
def test_an_unchanged_engine_passes_and_a_slower_build_or_a_token_less_is_found(
    engine_folder: Path, seeds: Sequence[int]
) -> None:
    assert DecodingProfile.load("profile.json").point.label.startswith("draft-simple")
    assert checks(engine_folder, "", seeds, machine=1.3) == [(0, "passed")] * len(seeds)
    for code, verdict in checks(engine_folder, "--slower 1.15", seeds):
        assert code == 1 and verdict.startswith("failed: time over plain decoding's +"), verdict
    for code, verdict in checks(engine_folder, "--loses-one", seeds):
        assert code == 1 and "1 have worse counts, 0 other counts" in verdict, verdict
