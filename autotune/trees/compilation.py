"""Decorators of compiled functions, and the directory in which numba caches their machine code.

numba renews the cached code of a function when the function's own file changes, but not when the file of a function
that it calls does. The directory is therefore named by a hash of all files of this package, which hold whatever
compiled code calls; directories of other versions are deleted.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.files import content_key, sha256_of, user_cache

try:
    from numba import config, njit
except ModuleNotFoundError:  # the core, in which these functions are not called
    config = njit = None


def _cache_directory() -> str:
    """A directory in ``NUMBA_CACHE_DIR`` if that is set, else beside the package's bytecode, else in the user's
    cache.
    """
    package = Path(__file__).resolve().parent
    if config.CACHE_DIR:
        parent = Path(config.CACHE_DIR)
    else:
        parent = package / "__pycache__" if os.access(package, os.W_OK) else user_cache()
    prefix = f"compiled-{content_key(str(package))}-"
    directory = parent / (prefix + sha256_of(*sorted(package.glob("*.py")))[:16])
    for other in parent.glob(prefix + "*"):
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
    return str(directory)


_DIRECTORY = _cache_directory() if njit else ""


def _cached_jit(**options: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        if njit is None:
            return function
        previous, config.CACHE_DIR = config.CACHE_DIR, _DIRECTORY  # read when the function is decorated
        try:
            return njit(cache=True, nogil=True, _nrt=False, **options)(function)
        finally:
            config.CACHE_DIR = previous

    return decorate


# The loops run over arrays that outlive them and allocate nothing, so they do without numba's reference counting, which
# took four fifths of their time; and without Python's lock, so that replay runs on all cores.
compiled = _cached_jit()
# For calls made on every level: an ordinary call passes on the hundred numbers that describe a tree's arrays.
inlined = _cached_jit(inline="always")


def dispatcher(
    name: str, arguments: Sequence[str], steps: Sequence[Any], *, default: str = "None", decorate: Any = compiled
) -> Any:
    """The compiled function ``name(kind, *arguments)``, which calls step number ``kind`` with those of the arguments
    that the step's parameters name; ``default``: the value where the step is None.

    numba inlines and types only functions that it knows, so that the branches are written as source code.
    """
    branches = [
        f"    if kind == {number}:\n        return step_{number}({', '.join(inspect.signature(step).parameters)})\n"
        for number, step in enumerate(steps)
        if step is not None
    ]
    source = f"def {name}({', '.join(['kind', *arguments])}):\n{''.join(branches)}    return {default}\n"
    # numba caches functions of files and of named modules; this file's name serves.
    namespace = {"__name__": __name__} | {f"step_{number}": step for number, step in enumerate(steps)}
    exec(compile(source, __file__, "exec"), namespace)
    return decorate(namespace[name])
