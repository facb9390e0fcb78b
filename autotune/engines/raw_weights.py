"""Weights of safetensors files as bytes, which are renamed and rearranged without torch: numpy has no bfloat16."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.files import write_bytes
from autotune.modeling.weight_files import check_whole

LENGTH_BYTES = 8  # of the header's length, at the begin of a file; what follows the header is aligned to it
METADATA = "__metadata__"


@dataclass(frozen=True)
class RawWeight:
    dtype: str
    """As in the file: ``F32``, ``BF16``."""
    shape: tuple[int, ...]
    content: NDArray[np.uint8]
    """The elements in the order of their rows, [bytes]."""

    @property
    def element_bytes(self) -> int:
        return len(self.content) // max(1, math.prod(self.shape))

    def with_first_columns_last(self, number: int) -> RawWeight:
        """The matrix whose first columns follow the others."""
        rows = self.content.reshape(self.shape[0], -1)
        rolled = np.roll(rows, -number * self.element_bytes, axis=1)
        return RawWeight(self.dtype, self.shape, rolled.reshape(-1))

    def zero_bias(self) -> RawWeight:
        """A zero for each row of the matrix."""
        num_rows = self.shape[0]
        return RawWeight(self.dtype, (num_rows,), np.zeros(num_rows * self.element_bytes, np.uint8))


def read_weights(path: Path) -> dict[str, RawWeight]:
    """The weights of a file by name, mapped into memory.

    Raises:
        UserError: the file ends before a weight does.
    """
    check_whole(path)
    content = np.memmap(path, np.uint8, mode="r")
    begin = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    weights = {}
    for name, entry in json.loads(content[LENGTH_BYTES:begin].tobytes()).items():
        if name != METADATA:
            first, end = entry["data_offsets"]
            weights[name] = RawWeight(entry["dtype"], tuple(entry["shape"]), content[begin + first : begin + end])
    return weights


def write_weights(path: Path, weights: Mapping[str, RawWeight]) -> None:
    """Write a safetensors file by ``write_bytes``. Weights of larger elements come first, so that each is aligned."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    ordered = sorted(weights.items(), key=lambda entry: -entry[1].element_bytes)
    end = 0
    for name, weight in ordered:
        first, end = end, end + len(weight.content)
        header[name] = {"dtype": weight.dtype, "shape": weight.shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    contents = [np.ascontiguousarray(weight.content).data for _, weight in ordered]
    write_bytes(path, b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *contents]))
