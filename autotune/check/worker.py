"""One side of a timed comparison: decodes the requested prompts and reports times and counts.

Runs as a script with the code under test, which may be older than this file, so it uses only autotune's public interface.
Requests are lines of JSON on standard input, answers lines of JSON on standard output. It ends when its input is closed.

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
from collections.abc import Iterator
from typing import Any, TextIO

# Keys that later versions added, with the value that means what versions without them do: hyperparameters of trees by
# policy, choices of a subnet, and requirements of a condition.
LATER_KEYS: dict[str, dict[str, Any]] = {
    "chain": {"p_min": 0.0, "n_min": 0},
    "sage": {
        "below_threshold": "drop",
        "threshold": 0.1,
        "threshold_on": "path",
        "rounding": "nearest",
        "plan": "current",
        "first_paths": None,
    },
    "wetap": {"nucleus": "all"},
    "subnet": {"visual_ranking": "text_after_image", "operator": None, "operator_ratio": None, "vocabulary": None},
    "when": {"context_tokens": None, "has_image": None},
}
# Keys of records that later versions added and that decide nothing about the tokens of a decoder.
LATER_RECORDS = {
    "profile": ("prefill_threads", "attention_backends"),
    "provenance": ("contention",),
    "workload": ("max_new_tokens", "temperature"),
    "evidence": ("best_default", "gains", "shrinkage"),
}
# The present defaults of those whose default is another value.
LATER_DEFAULTS = {"below_threshold": "leaf", "nucleus": "top_k"}
# Names of keys and values in schema 1.
FORMER_KEYS = {"mode": "runner", "capture_sizes": "buckets"}
FORMER_MODES = {"cuda-graph": "graph"}
# Parts of the messages by which versions refuse profiles of later ones.
REFUSALS = ("newer than this program reads", "unknown key")


class Stopwatch:
    """A streamer for ``generate`` that notes when the first and the last token came.

    It has its own clock, because the clock of the code under test may be what a change has changed.
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
        return self.put_s[1]  # the first call passes the prompt


class SideDecoder:
    """A profile's decoder, and plain decoding with the same model."""

    def __init__(self, profile: str, device: str) -> None:
        import autotune

        self.package = os.path.dirname(os.path.abspath(autotune.__file__))
        self.tuned = _load(profile, device)
        # Plain decoding runs its steps as the profile does: a slower baseline would flatter the draft.
        names = ("threads", "prefill_threads", *FORMER_KEYS, *FORMER_KEYS.values())
        steps = {name: getattr(self.tuned, name) for name in names if hasattr(self.tuned, name)}
        self.plain = autotune.Decoder(
            target=self.tuned.target_model, draft=None, **_accepted(steps, autotune.Decoder.__init__)
        )
        if hasattr(self.plain, "prepare"):  # loading has prepared the other one; earlier versions capture in requests
            self.plain.prepare()

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        """Times, counts and a hash of the tokens of one prompt, decoded with the profile or plainly."""
        from safetensors.torch import load_file

        decoder = self.plain if request["plain"] else self.tuned
        inputs = load_file(request["inputs"], device=str(self.tuned.target_model.device))
        extra = _accepted({"workload": request["task"]}, decoder.generate)
        gc.collect()  # else one prompt would pay for the garbage of another
        watch = Stopwatch()
        output = decoder.generate(**inputs, **request["settings"], **extra, streamer=watch)
        stats = output.stats
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return {
            "first_token_ms": watch.first_token_ms,
            "decode_ms": watch.decode_ms,
            "new_tokens": len(tokens),
            "tokens_sha256": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
            "target_forwards": stats.target_forwards,
            "draft_forwards": stats.draft_forwards,
            "plain_steps": stats.plain_steps,
            "verified_nodes": sum(stats.verified_nodes),
            "accepted_lengths": list(stats.accepted_lengths),
        }


def _load(profile: str, device: str) -> Any:
    """The profile's decoder. An earlier version that refuses the profile is given it in earlier forms, one after the other."""
    import autotune

    refusal = None
    for path in _forms(profile):
        try:
            return autotune.load(path, device=device)
        except Exception as error:
            is_refused = isinstance(error, getattr(autotune, "UserError", ()))
            if not is_refused or not any(text in str(error) for text in REFUSALS):
                raise
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _forms(profile: str) -> Iterator[str]:
    """The profile, then copies of it as earlier versions wrote it.

    Raises:
        UserError: an earlier form cannot say what the profile does.
    """
    yield profile
    with open(profile, encoding="utf-8") as file:
        content = json.load(file)
    for number, convert in enumerate((_to_first_of_schema_3, _to_schema_2, _to_schema_1)):
        convert(content)
        earlier = f"{profile}.earlier-{number}.json"
        with open(earlier, "w", encoding="utf-8") as file:
            json.dump(content, file)
        yield earlier


def _to_first_of_schema_3(content: dict[str, Any]) -> None:
    """Leave out later records of the search, which decoding does not read, and later requirements of conditions."""
    for part, keys in LATER_RECORDS.items():
        for key in keys:
            (content if part == "profile" else content.get(part, {})).pop(key, None)
    for point in content.get("points", ()):
        (point.get("predicted") or {}).pop("interval90", None)
    for number, point in enumerate(content.get("points", ())):
        _leave_out(point.get("when", {}), LATER_KEYS["when"], f"points.{number}.when")


def _to_schema_2(content: dict[str, Any]) -> None:
    """Leave out the keys that later versions added. Versions that have them read their earlier values from schema 2."""
    if content.get("schema") == "autotune.decoding-profile/2":
        return
    content["schema"] = "autotune.decoding-profile/2"
    for number, point in enumerate(content.get("points", ())):
        tree, draft = point.get("tree") or {}, point.get("draft") or {}
        _leave_out(tree, LATER_KEYS.get(str(tree.get("policy")), {}), f"points.{number}.tree")
        _leave_out(draft.get("subnet", {}), LATER_KEYS["subnet"], f"points.{number}.draft.subnet")


def _leave_out(record: dict[str, Any], later: dict[str, Any], where: str) -> None:
    import autotune

    for key, earlier in later.items():
        value = record.pop(key, LATER_DEFAULTS.get(key, earlier))
        if value != earlier:
            raise autotune.UserError(
                f"{where}.{key} is {json.dumps(value)}, and versions without that key do what is now {json.dumps(earlier)}; "
                "compare with a version that has it"
            )


def _to_schema_1(content: dict[str, Any]) -> None:
    """Give keys and values their former names."""
    content["schema"] = "autotune.decoding-profile/1"
    for key, former in FORMER_KEYS.items():
        if key in content:
            content[former] = content.pop(key)
    content["runner"] = FORMER_MODES.get(content.get("runner", "eager"), content.get("runner", "eager"))


def _accepted(options: dict[str, Any], function: Any) -> dict[str, Any]:
    """The options that a function has parameters for; earlier versions lack some."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def serve(requests: TextIO, answers: TextIO, settings: dict[str, Any]) -> None:
    """Load, report that, and answer every request. An error is an answer too, and the last one."""

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        side = SideDecoder(settings["profile"], settings["device"])
        answer(ready=side.package)
        for line in requests:
            answer(**side.decode(json.loads(line)))
    except BrokenPipeError:  # the parent has ended
        pass
    except Exception as error:
        traceback.print_exc()
        answer(error=" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    # The answers have a channel of their own: what libraries print to standard output goes to the log.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel, json.loads(sys.argv[1]))
