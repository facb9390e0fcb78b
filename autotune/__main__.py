"""``python -m autotune``, for launchers that start modules: ``accelerate launch --module autotune train``."""

from autotune.cli.main import main

if __name__ == "__main__":  # worker processes of a search import this module too
    main()
