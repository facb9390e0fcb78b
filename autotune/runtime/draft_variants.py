"""The variants of loaded drafts that a search space contains."""

from __future__ import annotations

from autotune.documents.configuration import DraftVariant
from autotune.documents.search_space import SearchSpace
from autotune.errors import UserError
from autotune.runtime.model_pool import ModelPool


def variants_of(pool: ModelPool, space: SearchSpace) -> list[DraftVariant]:
    """All variants of a space: its subnets of every draft of a pool. Heads and layers of a space apply to supernets.
    Drafts that see no images have no visual tokens to choose.

    Raises:
        UserError: the space has parts of heads only, or given layers, and no draft is a supernet; operators only
            and no draft has a compressor; cut vocabularies only and no draft has token frequencies; or weights in
            float8 only and no draft reads the target's features.
    """

    def check(is_choosable: bool, who_has: str, what: str) -> None:
        if not is_choosable:
            raise UserError(f"only {who_has} {what} to choose; got {', '.join(pool.drafts)}; leave {what} out")

    dimensions = [draft.dimensions for draft in pool.drafts.values()]
    if 1.0 not in space.heads or isinstance(space.injection_layers, list):
        supernets = any(known.injection_layers for known in dimensions)
        check(supernets, "a star draft has", "heads and layers")
    if "gate" not in space.operators:
        compressors = any(known.operators for known in dimensions)
        check(compressors, "a specvlm draft with a compressor has", "operators")
    if 1.0 not in space.vocabularies:
        counting = "drafts with token frequencies, which autotune train counts, have"
        check(any(known.has_vocabularies for known in dimensions), counting, "vocabularies")
    check(
        "unchanged" in space.weights or any(known.has_float8 is not None for known in dimensions),
        "drafts that read the target's features have",
        "weights",
    )
    blind = space.without_images()
    return [
        (id, subnet)
        for id, draft in pool.drafts.items()
        for subnet in (space if draft.sees_images else blind).subnets(id, draft.subnet, *draft.dimensions)
    ]
