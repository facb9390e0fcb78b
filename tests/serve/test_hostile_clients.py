"""Hundreds of requests at once, some cancelled, some malformed: right answers, no error of the server, no hang, flat
memory.
"""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.runtime.decoder import Decoder
from tests.serve.servers import begin, get, send, start_serving, url_of, wait_for
from tests.serve.test_app import ASKED, BODIES, CHAT, COMPLETIONS, MESSAGES, WRONG, text_of
from tests.tiny_models import Pair

NUM_REQUESTS, NUM_MALFORMED, NUM_CLIENTS = 500, 50, 8
WARM = 100  # requests after which memory is flat
SLACK = 32 << 20  # bytes that it may grow by
PROMPTS = [f"USER: Count to {word}, then stop. ASSISTANT:" for word in ("two", "ten", "nine", "a hundred")]


def right_answers(pair: Pair, processor: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """Completions, greedy and sampled, with the texts of the target alone."""
    plain, answers = Decoder(pair.target, processor=processor), {}
    for number, prompt in enumerate(PROMPTS * 3):
        settings = {"temperature": 0.0} if number < len(PROMPTS) else {"temperature": 0.8, "seed": number}
        inputs = processor(text=prompt, return_tensors="pt")
        output = plain.generate(**inputs, **settings, max_new_tokens=20)
        body = {"prompt": prompt, "max_tokens": 20, **settings}
        answers[str(number)] = body, text_of(plain, output.sequences[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


@pytest.mark.nightly
@pytest.mark.long
def test_500_requests_of_which_a_third_is_cancelled(pair: Pair, processor: Any, tmp_path: Path) -> None:
    answers, order = right_answers(pair, processor), random.Random(0)
    process, log = start_serving(pair, tmp_path)
    try:
        url = url_of(process, log)

        def malformed(choice: int, _: float) -> str:
            path, change, _ = WRONG[choice % len(WRONG)]
            whole = ASKED if path == COMPLETIONS else {"messages": MESSAGES, "max_tokens": 3}
            body = BODIES[choice % len(BODIES)] if choice % 3 == 0 else {**whole, **change}
            status = send(url, COMPLETIONS if choice % 3 == 0 else path, body)[0]
            assert 400 <= status < 500, (choice, status)
            return "malformed"

        def cancelled(choice: int, seconds: float) -> str:
            body = {**answers[str(choice % len(answers))][0], "max_tokens": 400, "stream": bool(choice % 2)}
            connection = begin(url, COMPLETIONS, body)
            response = connection.getresponse() if choice % 4 == 1 else None  # in the middle of its stream
            time.sleep(seconds)
            if choice % 3 == 0:  # a reset in place of an orderly end
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
            if response is not None:
                response.close()
            return "cancelled"

        def answered(choice: int, _: float) -> str:
            body, text = answers[str(choice % len(answers))]
            is_stream = choice % 2 == 0
            status, content, _ = send(url, COMPLETIONS, {**body, "stream": is_stream})
            assert status == 200, content
            events = [json.loads(event[6:]) for event in content.split("\n\n")[:-2]] if is_stream else [content]
            assert "".join(event["choices"][0]["text"] for event in events) == text, choice
            return "answered"

        run = {"malformed": malformed, "cancelled": cancelled, "answered": answered}
        kinds = ["malformed"] * NUM_MALFORMED + ["cancelled"] * (NUM_REQUESTS // 3)
        kinds += ["answered"] * (NUM_REQUESTS - len(kinds))
        order.shuffle(kinds)
        tasks = [(kind, order.randrange(10**6), order.expovariate(10)) for kind in kinds]
        memory = psutil.Process(process.pid).memory_info
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            done = list(pool.map(lambda task: run[task[0]](*task[1:]), tasks[:WARM]))
            before = memory().rss
            done += list(pool.map(lambda task: run[task[0]](*task[1:]), tasks[WARM:]))
        wait_for(lambda: get(url, "/health") == (200, {"status": "ready", "open_requests": 0}))
        grown = memory().rss - before
        assert Counter(done) == Counter(kinds) and grown < SLACK, grown
        assert send(url, CHAT, {"messages": MESSAGES, "max_tokens": 3})[0] == 200
        counts = re.findall(r'^autotune_requests_total\{outcome="(\w+)".* (\d+)\.0$', get(url, "/metrics")[1], re.M)
        assert int(dict(counts)["stopped"]) >= NUM_REQUESTS // 20, "some are cancelled while they are decoded"
        print(Counter(done), f"memory grew by {grown / 2**20:.1f} MiB", counts)
        assert "Traceback" not in log.with_suffix(".err").read_text()
        process.terminate()
        process.join(600)
        assert process.exitcode == 0
    finally:
        process.kill()
