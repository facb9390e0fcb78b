"""Prompts with images in vLLM, by a transcript of the real one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from autotune.documents.speculation import Speculation
from autotune.engines.ngram_drafters import KnownRequest
from autotune.engines.replay import replay_speculation
from autotune.engines.served import Served
from autotune.engines.vllm import chat_request
from autotune.workloads.pixels import load_image
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.engines.recorded_llama import CONTEXT
from tests.engines.recorded_vllm import IMAGE_TRANSCRIPT

TRANSCRIBED = json.loads(IMAGE_TRANSCRIPT.read_text())
IMAGE, OTHER = Image.new("RGB", (2, 1), "red"), Image.new("RGB", (2, 1), "blue")


@pytest.mark.parametrize("server", TRANSCRIBED["servers"], ids=lambda server: server["speculation"]["type"])
def test_replay_over_placeholders_gives_the_counts_of_the_real_server(server: dict[str, Any]) -> None:
    fields = [{name: row[name] for name in row if name not in ("text", "image")} for row in TRANSCRIBED["prompts"]]
    requests = [KnownRequest(Served.of(**row)) for row in (*fields, *fields[:2])]
    replays = replay_speculation(Speculation(**server["speculation"]), requests, CONTEXT)
    found = [list(one.counts) for one in replays]
    assert found == server["counts"] and sum(accepted for _, _, accepted in found)


def test_a_chat_has_its_images_where_the_messages_have_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}, {"type": "image"}]
    asked = Prompt(messages=[{"role": "user", "content": parts}], images=["a", "b"], max_pixels=9)  # type: ignore[list-item]
    request = chat_request(WorkloadPrompt("p", asked, (IMAGE, OTHER)))
    (message,) = request["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "text", "image_url"]
    sent = [load_image(part["image_url"]["url"]) for part in message["content"][1::2]]
    assert [np.array(one).tolist() for one in sent] == [np.array(one).tolist() for one in (IMAGE, OTHER)]
    assert request["mm_processor_kwargs"] == {"max_pixels": 9}
