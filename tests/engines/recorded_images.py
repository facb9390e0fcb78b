"""A transcript of the real vLLM with images, which ``recorded_vllm`` plays back.

``python -m tests.engines.recorded_images`` records ``image_transcript.json`` from vLLM (0.32.0 on a CPU and the bundled
``digits/target`` here).
"""

from __future__ import annotations

from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.vllm import PRICED_BY, VllmBackend
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload
from tests.engines.recorded_llama import record
from tests.engines.recorded_vllm import COMMAND, IMAGE_TRANSCRIPT

LIMIT = 32
RECORDED = [PRICED_BY, *(Speculation(type=kind, options=OPTIONS[kind]) for kind in ("ngram", "suffix"))]


def image_prompts() -> list[WorkloadPrompt]:
    """Prompts of ``digits`` with an image, the last with the first one's text and another image."""
    prompts = load_workload("digits", "evaluate").first_turns().prompts
    return [prompts[number].cut(LIMIT) for number in (0, 1, 2, 3, 4, 40)]


if __name__ == "__main__":
    record(VllmBackend("digits/target", command=COMMAND), IMAGE_TRANSCRIPT, image_prompts(), RECORDED, [])
