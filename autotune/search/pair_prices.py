"""Prices of models on a GPU, or on several that share the target, from their configs alone: ``autotune search --gpu
4xh100 --random-weights``.

What a draft's tokens are worth is not known without weights, so nothing is chosen: tables say how many tokens a round
of each tree must commit to be faster than plain decoding.
"""

from __future__ import annotations

from autotune.console import Console
from autotune.cost.roofline import DatasheetLimits, find_limits, step_parts
from autotune.cost.table import USABLE_MEMORY, CostTable, DraftCosts, ModelShape
from autotune.documents.execution import EAGER
from autotune.documents.search_space import subnets_of_drafts
from autotune.errors import UserError
from autotune.measuring.tables import priced_variants, show_table
from autotune.runtime.model_pool import load_pool, variants_of
from autotune.search.prices import table_for_gpu
from autotune.study.search_settings import SearchSettings
from autotune.table import Table, number, times

# Drafted tokens and levels of the trees in the tables: chains, and trees with levels of equal width. The last one is
# the published default ``eagle2``.
SHAPES = ((1, 1), (3, 3), (5, 5), (8, 8), (16, 4), (32, 6), (60, 6))
GIVEN_M = (2, 3, 4)  # tokens per round whose speedups are printed
KV_LENGTH = 1024


def price_pair(settings: SearchSettings, console: Console) -> CostTable:
    """Print what a target and its drafts cost on the card of the settings, and what must be accepted for a gain.

    Raises:
        UserError: no card with a datasheet is named, or a model cannot be made from its config.
    """
    card = settings.gpu or ""
    limits = find_limits(card)
    if limits is None:
        raise UserError(
            f"--random-weights: prices models on a card with a datasheet; got --gpu {settings.gpu}; name a card, such as --gpu h100"
        )
    pool = load_pool(settings, "cpu", console, mode=EAGER, sizes_alone=True)
    variants = priced_variants(variants_of(pool, subnets_of_drafts(settings.changes)))
    table = table_for_gpu(card, pool, variants, settings.mode, say=console.say)
    show_table(table, console)
    shape = pool.target.shape
    console.show(parts_table(shape, limits, table.mode))
    for costs in table.drafts:
        console.show(rounds_table(table, costs))
    needed_gb = (shape.bytes_on_each(limits.num_devices, KV_LENGTH) + pool.draft_bytes) / 1e9
    if needed_gb > USABLE_MEMORY * limits.memory_gb:
        console.say(
            f"the weights and {KV_LENGTH:,} tokens take {needed_gb:.0f} GB of the card with the drafts, and a card of "
            f"{card} has {limits.memory_gb:.0f} GB: they do not fit on one"
        )
    console.say(shape.cards_needed(limits.model, 1e9 * limits.memory_gb))
    console.say(
        "estimated from sizes and a datasheet. Random weights accept nothing of each other, so no gain is claimed: with the "
        f"weights, autotune search --target {settings.target} --gpu {settings.gpu} finds what is accepted"
    )
    return table


def parts_table(shape: ModelShape, limits: DatasheetLimits, mode: str) -> Table:
    """The parts of the time of the target's forward passes: plain steps, and verifications of the trees."""
    parts = {size: step_parts(shape, limits, size, KV_LENGTH, mode) for size in (1, *(1 + n for n, _ in SHAPES))}
    rows = [[str(size), *map(number, times_ms.values())] for size, times_ms in parts.items()]
    return Table(f"Target: parts of a forward pass at KV length {KV_LENGTH}, ms", ["tokens", *parts[1]], rows)


def rounds_table(table: CostTable, costs: DraftCosts) -> Table:
    """For trees of a draft, the tokens per round (M) from which they are faster than plain decoding, and the speedups
    at other M.
    """
    prices = table.prices(costs.draft, max_tokens=1 + SHAPES[-1][0], max_kv_length=KV_LENGTH, subnet=costs.subnet)
    column = KV_LENGTH // prices.kv_step - 1
    plain_ms, rows = prices.decode_ms[column], []
    for tokens, levels in SHAPES:
        levels_ms = prices.draft_first_ms[1, column] + (levels - 1) * prices.draft_level_ms[tokens // levels, column]
        overhead_ms = costs.overhead.round_ms + costs.overhead.level_ms * levels
        ms = levels_ms + prices.verify_ms[1 + tokens, column] + overhead_ms
        name = f"chain, {tokens}" if tokens == levels else f"tree of {levels} levels, {tokens}"
        needed = f"{ms / plain_ms:.2f}" if ms / plain_ms <= levels + 1 else "never"
        speedups = (times(m * plain_ms / ms if m <= levels + 1 else None) for m in GIVEN_M)
        rows.append([name, f"{ms:.1f}", needed, *speedups, f"{levels_ms:.1f}", f"{overhead_ms:.1f}"])
    title = f"{costs.name}: rounds at KV length {KV_LENGTH}, where a plain step takes {plain_ms:.1f} ms"
    return Table(
        title, ["drafted tokens", "ms", "M to pay", *(f"at M {m}" for m in GIVEN_M), "draft, ms", "outside, ms"], rows
    )
