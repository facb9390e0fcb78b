"""One side of a timed comparison: decodes the prompts that it is told to, and says how long that took.

Runs as a script, by the code under test, which may be older than this file: of autotune it knows the public interface
alone. Requests come as lines of JSON on standard input, answers go as lines of JSON to standard output; it ends when
the requests do.

    python -P worker.py '{"profile": FILE, "device": "cpu"}'
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO


class Stopwatch:
    """A streamer, as ``generate`` takes it: notes when the first token came and when the last one had.

    Its own clock and not that of the code under test, which a change may have changed.
    """

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.put_s: list[float] = []
        self.ended_s = 0.0

    def put(self, _: Any) -> None:
        self.put_s.append(time.perf_counter())

    def end(self) -> None:
        self.ended_s = time.perf_counter()

    @property
    def first_token_ms(self) -> float:
        return 1e3 * (self._first_s - self.began_s)

    @property
    def decode_ms(self) -> float:
        """From the first token to the last."""
        return 1e3 * (self.ended_s - self._first_s)

    @property
    def _first_s(self) -> float:
        return self.put_s[1]  # the prompt was put before it


class Side:
    """A profile's decoder, and plain decoding by the same model."""

    def __init__(self, profile: str, device: str) -> None:
        import autotune

        self.where = os.path.dirname(os.path.abspath(autotune.__file__))
        self.tuned = autotune.load(profile, device=device)
        # Steps as the profile runs them (earlier versions: runner, buckets): a slower baseline would flatter the draft.
        steps = {
            name: getattr(self.tuned, name)
            for name in ("threads", "mode", "capture_sizes", "runner", "buckets")
            if hasattr(self.tuned, name)
        }
        self.plain = autotune.Decoder(
            target=self.tuned.target_model, draft=None, **_as_far_as_taken(steps, autotune.Decoder.__init__)
        )

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        """One prompt, by the profile or plainly: times, counts, and a hash of the tokens."""
        from safetensors.torch import load_file

        decoder = self.plain if request["plain"] else self.tuned
        inputs = load_file(request["inputs"], device=str(self.tuned.target_model.device))
        extra = _as_far_as_taken({"workload": request["task"]}, decoder.generate)
        gc.collect()  # or one side would pay for the garbage of another prompt
        watch = Stopwatch()
        output = decoder.generate(**inputs, **request["settings"], **extra, streamer=watch)
        stats = output.stats
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        accepted = list(stats.accepted_lengths)
        return {
            "first_token_ms": watch.first_token_ms,
            "decode_ms": watch.decode_ms,
            "new_tokens": len(tokens),
            "tokens_sha256": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
            "target_forwards": stats.target_forwards,
            "draft_forwards": stats.draft_forwards,
            "plain_steps": stats.plain_steps,
            "verified_nodes": sum(stats.verified_nodes),
            "accepted_lengths": accepted,
        }


def _as_far_as_taken(options: dict[str, Any], function: Any) -> dict[str, Any]:
    """Those of the options that the function has: an older one lacks some."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def serve(requests: TextIO, answers: TextIO, settings: dict[str, Any]) -> None:
    """Load, say so, and answer every request. What goes wrong is an answer as well, and the end."""

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        side = Side(settings["profile"], settings["device"])
        answer(ready=side.where)
        for line in requests:
            answer(**side.decode(json.loads(line)))
    except BrokenPipeError:  # nobody listens any more
        pass
    except Exception as error:
        traceback.print_exc()
        answer(error=" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    # What libraries print must not come between the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel, json.loads(sys.argv[1]))
