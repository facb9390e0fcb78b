"""Prompts with images in vLLM, by a transcript of the real one."""

from __future__ import annotations

import numpy as np
from PIL import Image

from autotune.engines.vllm import chat_request
from autotune.workloads.pixels import load_image
from autotune.workloads.prompt import Prompt, WorkloadPrompt

IMAGE, OTHER = Image.new("RGB", (2, 1), "red"), Image.new("RGB", (2, 1), "blue")


def test_a_chat_has_its_images_where_the_messages_have_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}, {"type": "image"}]
    asked = Prompt(messages=[{"role": "user", "content": parts}], images=["a", "b"], max_pixels=9)  # type: ignore[list-item]
    request = chat_request(WorkloadPrompt("p", asked, (IMAGE, OTHER)))
    (message,) = request["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "text", "image_url"]
    sent = [load_image(part["image_url"]["url"]) for part in message["content"][1::2]]
    assert [np.array(one).tolist() for one in sent] == [np.array(one).tolist() for one in (IMAGE, OTHER)]
    assert request["mm_processor_kwargs"] == {"max_pixels": 9}
