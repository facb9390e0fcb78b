"""Array types and size limits of trees. Importing this module does not load numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_NODES = 128  # draft nodes of a verified tree
MAX_DEPTH = 24  # draft levels
MAX_CHILDREN = 16  # of a node
MAX_WIDTH = 256  # nodes of a draft level
MAX_STEP = 160  # tokens of the largest forward pass
MAX_LEVEL_STEP = 128  # tokens of the largest forward pass of a draft level; wider levels take several passes
MAX_LEVELS = 32  # entries of an array indexed by depth
MAX_MATCH = 16  # tokens of the longest match that retrieval finds, or that is told apart
MAX_RETRIEVED = 16  # tokens that retrieval proposes as one branch
