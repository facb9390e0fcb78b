"""Depths by load: the search among them in a simulated server, what is kept, and schedules."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from autotune.console import Console
from autotune.documents.speculation import Speculation
from autotune.engines.vllm import vllm_arguments
from autotune.search.engine_loads import LoadServers, chosen_depth, schedule_of, times_of, tune_loads
from autotune.search.engine_tuning import tune_engine
from autotune.study.search_settings import SearchSettings
from tests.sample_documents import write_workload
from tests.search.simulated_server import PROMPTS, Prices, SimulatedServer

LOADS = (1, 4, 16, 64)
EAGLE3 = (0.8, 0.75, 0.71, 0.68, 0.66, 0.64, 0.62, 0.6)
MTP = (0.85, 0.6, 0.4, 0.3, 0.25, 0.2, 0.2, 0.2)
CODE = (0.93,) * 8
CHAT = (0.55, 0.4, 0.35, 0.3, 0.3, 0.3, 0.3, 0.3)
BAD = (0.12,) * 8
NARROW, STEEP = Prices(flat=150, token_ms=0.06), Prices(flat=128, token_ms=0.12, request_ms=0.04)
HEADS = {
    "eagle3": (EAGLE3, Prices()),
    "eagle3, narrow": (EAGLE3, NARROW),
    "mtp": (MTP, Prices()),
    "mtp, steep": (MTP, STEEP),
    "code, narrow": (CODE, NARROW),
    "chat, slow draft": (CHAT, Prices(flat=300, draft_ms=1.2)),
    "bad, steep": (BAD, STEEP),
}
BEST_AT_64 = {"eagle3": 3, "eagle3, narrow": 1, "bad, steep": 0}


@pytest.mark.parametrize("name", HEADS)
def test_the_best_depth_of_every_load_is_found_without_measuring_all(name: str) -> None:
    """The fastest of 0 to 8, by measuring them all, is among the measured ones, and is chosen unless it may be by
    chance that it is faster than a lesser one.
    """
    server, again = SimulatedServer(*HEADS[name]), SimulatedServer(*HEADS[name])
    servers, every = LoadServers(server, server.recorded, Console()), {load: {} for load in LOADS}
    for configuration in (None, *server.configurations()):
        every = servers.serve(every, configuration, configuration.depth or 0 if configuration else 0)
    best = {load: min(ms, key=ms.__getitem__) for load, ms in times_of(every).items()}
    runs = LoadServers(again, again.recorded, Console()).by_depth(server.configurations()[2], LOADS, math.inf)
    assert {load: min(ms, key=ms.__getitem__) for load, ms in times_of(runs).items()} == best
    assert {load: chosen_depth(of_load) for load, of_load in every.items()} == {
        load: chosen_depth(of_load) for load, of_load in runs.items()
    }
    assert len(server.served) == 9 * len(LOADS) > len(again.served) == len(LOADS) * len(runs[1])
    assert best[64] == BEST_AT_64.get(name, best[64]) and best[1] >= max(1, best[64] - 1)


def test_what_was_measured_is_kept_and_a_load_that_is_not_held_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tuned(server: SimulatedServer, until: float = math.inf) -> list[int]:
        servers, given = LoadServers(server, server.recorded, Console(), tmp_path), server.configurations()[2]
        results, _, _ = tune_loads(servers, LOADS, given, given, until)
        return [result.at_once for result in results]

    hurried, later = (SimulatedServer(MTP, STEEP, held=20) for _ in range(2))
    assert tuned(hurried, time.monotonic()) == [1, 4, 16] and {depth for depth, _ in hurried.served} == {0, 3}
    assert "the time is over" in capsys.readouterr().err
    assert tuned(later) == [1, 4, 16]
    said = capsys.readouterr().err
    assert said.count("left out   64 requests at once: the server ended while it was used, with exit code 1") == 1
    assert later.served[0] == (0, 64) and {depth for depth, load in later.served if load < 64} == {2, 4, 8}


GAINS = {1: {0: 2.0, 3: 1.0}, 4: {0: 2.0, 3: 1.0}, 16: {0: 1.0, 3: 2.0}}


@pytest.mark.parametrize(
    ("depths", "most", "schedule"),
    [
        ({1: 3, 4: 3}, 256, [(1, 256, 3)]),
        ({1: 5, 4: 3, 16: 3, 64: 1}, 256, [(1, 2, 5), (3, 32, 3), (33, 256, 1)]),
        ({1: 3, 4: 3, 16: 0}, 1024, [(1, 8, 3), (9, 1024, 0)]),
        ({1: 0, 64: 2}, 0, [(1, 8, 0), (9, 64, 2)]),
        ({1: 4, 2: 3, 3: 2}, 8, [(1, 1, 4), (2, 2, 3), (3, 8, 2)]),
    ],
)
def test_depths_between_loads(depths: dict[int, int], most: int, schedule: list[tuple[int, int, int]]) -> None:
    assert schedule_of(depths, GAINS, most) == schedule


def test_speculation_ends_where_its_gain_does() -> None:
    """A gain of 2 at 4 requests and a loss of 2 ** 0.5 at 16: it ends after two thirds of the way."""
    ms = GAINS | {16: {0: 1.0, 3: 2**0.5}}
    assert schedule_of({4: 3, 16: 0}, ms, 64) == [(1, int(4 ** (1 / 3) * 16 ** (2 / 3)), 3), (11, 64, 0)]


def test_a_profile_holds_the_depths_by_load(tmp_path: Path) -> None:
    workload = write_workload(tmp_path, [{"prompt": f"Go on {n}."} for n in range(2 * PROMPTS)])
    settings = SearchSettings(target="digits/target", workload=str(workload), loads=(4, 64))
    profile = tune_engine(SimulatedServer(BAD, STEEP), settings, 60.0, tmp_path, Console())
    engine, deployment = profile.evidence.engine, profile.point.deployment
    assert engine is not None and deployment is not None and deployment.speculation is not None
    assert [(result.at_once, result.depth) for result in engine.loads] == [(4, 1), (64, 0)]
    (first, off) = engine.loads
    assert first.ratio[0] > 1.0 == off.ratio[0] and off.chosen == off.off and first.chosen.hit_rate == 0.25
    assert (
        first.ratio[1] <= first.ratio[0] <= first.ratio[2] and first.chosen.p95_ms[0] >= first.chosen.first_token_ms[0]
    )
    (_, last, depth), (begin, most, none) = engine.schedule
    assert (depth, none, begin, most) == (1, 0, last + 1, 1024) and 4 <= last < 64
    assert deployment.speculation.schedule == engine.schedule
    assert deployment.speculation.for_requests(1) == Speculation(type="mtp", options={"num_speculative_tokens": 1})
    assert deployment.speculation.for_requests(64) is None
    assert f"[1, {last}, 1], [{begin}, 1024, 0]" in vllm_arguments(deployment.speculation)[1]
