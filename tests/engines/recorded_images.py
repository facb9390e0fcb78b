"""A transcript of the real vLLM with images, and a small server that plays it back.

``python -m tests.engines.recorded_images`` records ``image_transcript.json`` from vLLM (0.32.0 on a CPU and the bundled
``digits/target`` here). As an executable the module is a vLLM that knows these images, pixel by pixel.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from PIL.Image import Image

from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.vllm import PRICED_BY, VllmBackend
from autotune.engines.vllm_images import CHAT, COMPLETIONS
from autotune.workloads.pixels import load_image
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload
from tests.engines.recorded_llama import serve
from tests.engines.recorded_vllm import COMMAND, RecordedVllm

TRANSCRIPT = Path(__file__).with_name("image_transcript.json")
LIMIT = 32
RECORDED = [PRICED_BY, *(Speculation(type=kind, options=OPTIONS[kind]) for kind in ("ngram", "suffix"))]


def image_prompts() -> list[WorkloadPrompt]:
    """Prompts of ``digits`` with an image, the last with the first one's text and another image."""
    prompts = load_workload("digits", "evaluate").first_turns().prompts
    return [prompts[number].cut(LIMIT) for number in (0, 1, 2, 3, 4, 40)]


def pixels_key(image: Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()[:16]


class RecordedImages(RecordedVllm):
    """A vLLM that is asked by chats with images."""

    transcript = TRANSCRIPT

    def reply(self, path: str, body: dict[str, Any]) -> Any:
        if "messages" in body:
            parts = body["messages"][-1]["content"]
            text = "".join(part["text"] for part in parts if part["type"] == "text")
            images = [pixels_key(load_image(part["image_url"]["url"])) for part in parts if part["type"] == "image_url"]
            rows = json.loads(self.transcript.read_text())["prompts"]
            self.recorded = [row for row in rows if (row["text"], [row["image"]]) == (text, images)]
            body = body | {name: self.recorded[0]["prompt_tokens"] for name in ("tokens", "prompt")}
        if path == "/tokenize":
            return body
        return super().reply(COMPLETIONS if path == CHAT else path, body)

    def parts(self, body: dict[str, Any], reply: Any) -> list[dict[str, Any]] | None:
        """A chat's first part has the role, and no tokens."""
        parts = super().parts(body, reply)
        if parts is None or "messages" not in body:
            return parts
        first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [{"choices": [first]}, *({"choices": [one["choices"][0] | {"delta": {}}]} for one in parts)]


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
    TRANSCRIPT.write_text('{{"prompts": [\n{}\n],\n"servers": [\n{}\n]}}\n'.format(*lines))


if __name__ == "__main__":
    if "--port" in sys.argv:
        serve(sys.argv[2:], RecordedImages)
    else:
        record()
