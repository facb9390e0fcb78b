"""A transcript of the real vLLM with images, which ``recorded_vllm`` plays back.

``python -m tests.engines.recorded_images`` records ``image_transcript.json`` from vLLM (0.32.0 on a CPU and the bundled
``digits/target`` here).
"""

from __future__ import annotations

import json
from typing import Any

from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.vllm import PRICED_BY, VllmBackend
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload
from tests.engines.recorded_vllm import COMMAND, IMAGE_TRANSCRIPT, pixels_key

LIMIT = 32
RECORDED = [PRICED_BY, *(Speculation(type=kind, options=OPTIONS[kind]) for kind in ("ngram", "suffix"))]


def image_prompts() -> list[WorkloadPrompt]:
    """Prompts of ``digits`` with an image, the last with the first one's text and another image."""
    prompts = load_workload("digits", "evaluate").first_turns().prompts
    return [prompts[number].cut(LIMIT) for number in (0, 1, 2, 3, 4, 40)]


def record() -> None:
    backend, prompts = VllmBackend("digits/target", command=COMMAND), image_prompts()
    with backend.started() as server:
        answers = [server.ask(prompt) for prompt in prompts]
        beyond = [server.continuation(*asked) for asked in zip(answers, prompts, strict=True)]
    rows, servers = list[dict[str, Any]](), list[dict[str, Any]]()
    for prompt, answer, after in zip(prompts, answers, beyond, strict=True):
        kept = answer.model_dump(include={"prompt_tokens", "tokens", "limit", "is_ended"})
        shown = {"text": prompt.settings.text, "image": pixels_key(prompt.images[0])}
        rows.append({**shown, **kept, "beyond": after})
    for speculation in RECORDED:
        with backend.started(speculation) as server:
            counts = [server.ask(prompt).counts for prompt in (*prompts, *prompts[:2])]
        servers.append({"speculation": speculation.model_dump(exclude_defaults=True), "counts": counts})
    lines = (",\n".join(map(json.dumps, part)) for part in (rows, servers))
    IMAGE_TRANSCRIPT.write_text('{{"prompts": [\n{}\n],\n"servers": [\n{}\n]}}\n'.format(*lines))


if __name__ == "__main__":
    record()
