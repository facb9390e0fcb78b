"""``autotune bench --engine``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.files import require_writable

if TYPE_CHECKING:
    from autotune.workloads.workload import Workload


def bench_engine(
    engine: str,
    profile: Path,
    load_prompts: Callable[[], Workload],
    device: str,
    *,
    executable: str | None,
    arguments: str,
    interleaved: bool,
    folder: Path | None,
    requests_at_once: Sequence[int],
    prices: Path | None,
) -> dict[str, Any]:
    """Compare the engine at an address, or vLLM that is started here, with its export, or measure its ``prices``.

    What needs neither models nor measurements is checked before torch is imported.

    Raises:
        UserError: see ``serving.comparison`` and ``serving.prices``.
    """
    from autotune.serving.client import EngineClient
    from autotune.serving.server import ServerOptions, find_executable

    client = servers = None
    if engine == "vllm":
        servers = ServerOptions(find_executable(executable), tuple(shlex.split(arguments)), interleaved)
    elif prices is not None:
        raise UserError("--prices: a server runs one draft length; give --engine vllm, which starts a server for each")
    else:
        client = EngineClient(engine)
    if prices is not None:
        require_writable(prices, "--prices")

    from autotune.console import Console
    from autotune.device import choose_device
    from autotune.serving.comparison import bench_running, bench_started
    from autotune.serving.prices import PRICED_BATCHES, measure_prices

    prompts, where, console = load_prompts(), choose_device(device), Console()
    sizes = tuple(requests_at_once)
    if client is not None:
        return bench_running(profile, client, prompts, where, console, folder=folder, requests_at_once=sizes or (1,))
    assert servers is not None
    if prices is None:
        return bench_started(
            profile, prompts, where, console, options=servers, folder=folder, requests_at_once=sizes or (1,)
        )
    found = measure_prices(
        profile, prompts, where, console, options=servers, folder=folder, requests_at_once=sizes or PRICED_BATCHES
    )
    found.save(prices)
    return found.model_dump(mode="json")
