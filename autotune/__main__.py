"""``python -m autotune``: for launchers that start modules, such as ``accelerate launch --module autotune train``."""

from autotune.cli.main import main

if __name__ == "__main__":  # helpers of a search import it as well
    main()
