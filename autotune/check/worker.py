"""One side of a timed comparison: decodes the requested prompts and reports times and counts.

Runs as a script with the code under test, which may be of another commit than this file, so it uses only autotune's
public interface. Requests are lines of JSON on standard input, answers lines of JSON on standard output. It ends when
its input is closed.

    python -P worker.py '{"profile": FILE, "options": {"device": "cpu"}}'
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO


class Stopwatch(list[float]):
    """A streamer for ``generate``: the times at which the prompt and new tokens came, and at which the answer ended.

    It has its own clock, because the clock of the code under test may be what a change has changed.
    """

    def put(self, *_: Any) -> None:
        self.append(time.perf_counter())

    end = put


def decode(decoder: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Time, counts and a hash of the tokens of one prompt, decoded with the profile."""
    from safetensors.torch import load_file

    inputs = load_file(request["inputs"], device=str(decoder.target_model.device))
    gc.collect()  # else one prompt would pay for the garbage of another
    watch = Stopwatch()
    output = decoder.generate(**inputs, **request["settings"], streamer=watch)
    stats = output.stats
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "decode_ms": 1e3 * (watch[-1] - watch[1]),  # from the first token
        "new_tokens": len(tokens),
        "tokens_sha256": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
        "target_forwards": stats.target_forwards,
        "draft_forwards": stats.draft_forwards,
        "plain_steps": stats.plain_steps,
        "verified_nodes": sum(stats.verified_nodes),
        "accepted_lengths": list(stats.accepted_lengths),
    }


def serve(requests: TextIO, answers: TextIO, settings: dict[str, Any]) -> None:
    """Load, report that, and answer every request. An error is an answer too, and the last one."""

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        import autotune

        decoder = autotune.load(settings["profile"], **settings["options"])
        answer(ready=os.path.dirname(os.path.abspath(autotune.__file__)))
        for line in requests:
            answer(**decode(decoder, json.loads(line)))
    except BrokenPipeError:  # the parent has ended
        pass
    except Exception as error:
        traceback.print_exc()
        # Mistakes of the user have an exit code; a full memory, torch's OutOfMemoryError too, is no fault either.
        is_fault = not hasattr(error, "exit_code") and "MemoryError" not in type(error).__name__
        answer(error=" ".join(f"{type(error).__name__}: {error}".split()), is_fault=is_fault)


if __name__ == "__main__":
    # The answers have a channel of their own: what libraries print to standard output goes to the log.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel, json.loads(sys.argv[1]))
