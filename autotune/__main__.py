"""``python -m autotune``: for launchers that start modules, such as ``accelerate launch --module autotune train``."""

from autotune.cli import main

main()
