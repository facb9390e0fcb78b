from tests.check.engine_folder import engine_folder

__all__ = ["engine_folder"]
