"""Array types and size limits of trees. Importing this module does not load numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_STEP = 160  # tokens of the largest forward: a verified tree (at most 128 nodes and the root) or a draft level
MAX_LEVELS = 32
