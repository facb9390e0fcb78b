"""A transcript of the real vLLM, and a small server that plays it back.

``python -m tests.engines.recorded_vllm FOLDER`` records ``vllm_transcript.json`` from vLLM (0.32.0 on a CPU and
SmolLM2-135M-Instruct in float32 here), as ``recorded_llama`` does; a setting that it holds is not recorded again. As an
executable the module is a vLLM that knows these prompts alone, and those with images of ``recorded_images``, pixel by
pixel; its drafts are the replay's, whose counts the transcript checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.documents.speculation import Speculation
from autotune.engines.served import Served
from autotune.engines.vllm import CHAT, COMPLETIONS
from autotune.workloads.pixels import load_image
from tests.engines.recorded_llama import CONTEXT, RecordedServer, is_begun_by, pixels_key, record, serve, text_prompts

TRANSCRIPT = Path(__file__).with_name("vllm_transcript.json")
IMAGE_TRANSCRIPT = Path(__file__).with_name("image_transcript.json")
COMMAND = "vllm --dtype float32 --gpu-memory-utilization 0.1 --enforce-eager"


class RecordedVllm(RecordedServer):
    transcripts = (TRANSCRIPT, IMAGE_TRANSCRIPT)
    generated = 0

    def speculation(self, given: dict[str, str]) -> Speculation | None:
        self.alias, self.is_counted = given["--served-model-name"], "--per-request-spec-decode-metrics" in given
        options = json.loads(given.get("--speculative-config", "{}"))
        method, model = options.pop("method", None), options.pop("model", "")
        return Speculation(type=method, options=options, model=model) if method else None

    def get(self, path: str) -> Any:
        names = zip(("drafts", "draft_tokens", "accepted_tokens"), self.counts.values(), strict=True)
        by_name = {"generation_tokens": self.generated} | {f"spec_decode_num_{name}": count for name, count in names}
        by_name |= {"prefix_cache_hits": self.cached.total(), "prefix_cache_queries": self.read.total()}
        lines = [f'vllm:{name}_total{{engine="0"}} {value}.0' for name, value in by_name.items()]
        lines.append(f'vllm:num_requests_waiting{{engine="0"}} {3.0 * ("--full" in self.switches)}')
        lines.append('vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0')
        shown = {"/metrics": "\n".join(lines), "/health": "", "/version": {"version": "0.32.0"}}
        return shown.get(path) or {"data": [{"id": self.alias, "max_model_len": CONTEXT}]}

    def reply(self, path: str, body: dict[str, Any]) -> Any:
        assert body["model"] == self.alias
        if path == "/tokenize":
            return {"tokens": self.known(body)["prompt_tokens"]}
        if path == "/detokenize":
            return {"prompt": " ".join(map(str, body["tokens"]))}
        assert path == (CHAT if "messages" in body else COMPLETIONS)
        assert body["temperature"] == 0.0 and body["return_token_ids"]
        limit = body["max_tokens"]
        if "allowed_token_ids" in body:
            return self.passes(Served.of(body["prompt"], body["allowed_token_ids"] * limit, limit))
        known = self.known(body)
        prompt = body.get("prompt", known["prompt_tokens"])
        if body.get("stream") and limit > 1:
            self.prefix_cached(body.get("cache_salt", ""), prompt)
        every = [*known["tokens"], *known["beyond"]]
        done = len(prompt) - len(known["prompt_tokens"])
        if body.get("ignore_eos") or done:
            following = every[done:]
            return self.passes(Served.of(prompt, following[:limit], limit, beyond=following[limit:]))
        tokens = known["tokens"][:limit]
        is_ended = known.get("is_ended", False)
        answer = Served.of(prompt, tokens, limit, beyond=every[len(tokens) :], is_ended=is_ended)
        return self.passes(answer, self.answered if limit > 1 else None)

    def known(self, body: dict[str, Any]) -> dict[str, Any]:
        """The prompt of a transcript that a request gives by its tokens, or by its text and image."""
        if "messages" not in body:
            given = body["prompt"]
            return next(row for row in self.recorded if is_begun_by(given, row["prompt_tokens"]))
        content = body["messages"][-1]["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        images = [pixels_key(load_image(part["image_url"]["url"])) for part in parts if part["type"] == "image_url"]
        return next(one for one in self.recorded if [one["text"], one.get("image")] == [text, *(images or [None])])

    def passes(self, answer: Served, counted: Callable[[Served], Served] | None = None) -> list[dict[str, Any]]:
        """The tokens of an answer by forward pass, counted."""
        answer = (counted or self.counted)(answer)
        self.generated += len(answer.tokens)
        drafts, tokens, parts = self.replayed.drafts, answer.tokens, []
        for length in (1, *(accepted + 1 for _, accepted in drafts), *[1] * len(tokens)):
            parts.append({"token_ids": tokens[:length], "finish_reason": None})
            tokens = tokens[length:]
            if not tokens:
                break
        parts[-1]["finish_reason"] = "stop" if answer.is_ended else "length"
        return parts

    def parts(self, body: dict[str, Any], reply: Any) -> list[dict[str, Any]] | None:
        """A chat's first part has the role and no tokens, and the last part the usage, with the counts of a server that
        has them.
        """
        if not body.get("stream"):
            return None
        assert body["stream_options"] == {"include_usage": True}
        first = [{"delta": {"role": "assistant"}, "finish_reason": None}] if "messages" in body else []
        last = {"choices": [], "usage": {}} | (
            {"metrics": {"speculative_decoding": self.metrics()}} if self.is_counted else {}
        )
        return [*({"choices": [part]} for part in (*first, *({"delta": {}} | part for part in reply))), last]

    def metrics(self) -> dict[str, Any]:
        """Counts of the last request; with ``--lies`` of one with more tokens."""
        drafts = self.replayed.drafts + ([(5, 5)] * 9 if "--lies" in self.switches else [])
        drafted, accepted = ([row[index] for row in drafts] for index in (0, 1))
        sums = {
            "num_spec_steps": len(drafts),
            "num_draft_tokens": sum(drafted),
            "num_accepted_draft_tokens": sum(accepted),
        }
        return sums | ({"per_step_drafted": drafted, "per_step_accepted": accepted} if drafts else {})


if __name__ == "__main__":
    if "--port" in sys.argv:
        serve(sys.argv[2:], RecordedVllm)
    else:
        from autotune.engines.vllm import VllmBackend
        from benchmarks.engine_counts import settings

        done = json.loads(TRANSCRIPT.read_text())["servers"] if TRANSCRIPT.exists() else []
        record(VllmBackend(sys.argv[1], command=COMMAND), TRANSCRIPT, text_prompts(), settings("vllm"), done)
