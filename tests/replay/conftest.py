"""The fixtures of recorded traces, which replay is tested on."""

from tests.recording.conftest import draft, draft_reference, recorder, target, workload

__all__ = ["draft", "draft_reference", "recorder", "target", "workload"]
