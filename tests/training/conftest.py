"""The tiny target, as teacher of drafts. Models are imported by the fixture that needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from autotune.modeling.target import Target
    from tests.tiny_models import Pair


@pytest.fixture(scope="module")
def target(pair: Pair) -> Target:
    from autotune.modeling.target import Target

    return Target(pair.target)
