"""An engine that misbehaves on request, in this process and on the loopback: SGLang and vLLM routes over fixed counts.

`faults` maps a prompt to a list of faults, one consumed an attempt: 500, 429, 400, hang, trickle, half, fields, close,
error. A prompt without faults left is answered rightly. `info`: more answers of vLLM to a GET, by path.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKENS, K = 9, 3
LENGTHS = {0: [3, 3], 1: [0, 1, 2, 1], 2: [0, 0, 1, 0, 3]}
"""Accepted drafts of every verify step, by prompt number modulo 3; steps + accepted = 8 tokens after the first."""


class FakeEngine:
    """State of one fake server."""

    def __init__(self, kind="sglang", faults=None, algorithm="EAGLE3", counters=True, text="word ", info=None) -> None:
        self.kind, self.faults, self.algorithm, self.counters, self.text = kind, faults or {}, algorithm, counters, text
        self.info = info or {}
        self.requests: list[str] = []
        self.active = self.most = 0
        self.generated = self.foreign = 0
        self.drafts, self.accepted, self.per_position = 0, 0, defaultdict(int)
        self.lock = threading.Lock()
        self.url = ""

    def fault(self, prompt):
        with self.lock:
            self.requests.append(prompt)
            return self.faults[prompt].pop(0) if self.faults.get(prompt) else None

    def served(self, prompt):
        """Counters of the whole server after one more reply."""
        lengths = LENGTHS[number(prompt) % 3]
        with self.lock:
            self.generated += TOKENS
            self.drafts += len(lengths)
            self.accepted += sum(lengths)
            for place in range(K):
                self.per_position[place] += sum(n > place for n in lengths)
        return lengths

    def metrics(self):
        lines = [
            "# HELP vllm:generation_tokens_total",
            f'vllm:generation_tokens_total{{e="0"}} {self.generated + self.foreign}.0',
        ]
        if self.algorithm is not None:
            lines += [
                f'vllm:spec_decode_num_drafts_total{{e="0"}} {self.drafts}.0',
                f'vllm:spec_decode_num_draft_tokens_total{{e="0"}} {self.drafts * K}.0',
                f'vllm:spec_decode_num_accepted_tokens_total{{e="0"}} {self.accepted}.0',
            ]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{e="0",position="{p}"}} {self.per_position[p]}.0' for p in range(K)]
        return "\n".join(lines)


def number(prompt: str) -> int:
    return int(prompt.rsplit("-", 1)[1])


@contextmanager
def running(**options):
    """A fake engine that listens until the block ends."""
    state = FakeEngine(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, body, kind="application/json"):
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            report = {
                "speculative_algorithm": state.algorithm,
                "speculative_num_steps": K,
                "tp_size": 8,
                "api_key": "secret",
            }
            answers = {
                "sglang": {"/server_info": report, "/health": {}},
                "vllm": {
                    "/version": {"version": "0.33.0"},
                    "/v1/models": {"data": [{"id": "tiny"}]},
                    "/metrics": state.metrics(),
                    **state.info,
                },
                "other": {},
            }[state.kind]
            self.reply(200, answers[self.path]) if self.path in answers else self.reply(404, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body.get("text") or body.get("prompt") or body["messages"][-1]["content"]
            with state.lock:
                state.active += 1
                state.most = max(state.most, state.active)
            try:
                self.answer(prompt, state.fault(prompt))
            except OSError:
                pass  # the client has left, as it should after a time-out
            finally:
                with state.lock:
                    state.active -= 1

        def answer(self, prompt, fault):
            if isinstance(fault, int):
                return self.reply(fault, {"detail": f"planned {fault}"})
            if fault == "hang":
                self.connection.recv(1)  # until the client leaves
                return self.close()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if fault == "trickle":
                while True:  # until the client leaves
                    self.chunk(b":")
                    time.sleep(0.05)
            if fault == "error":
                self.chunk(b'data: {"error": {"message": "out of memory"}}\n\n')
                return self.close()
            events = self.sglang(prompt, fault) if state.kind == "sglang" else self.vllm(prompt, fault)
            for place, event in enumerate(events):
                data = b"data: " + json.dumps(event).encode() + b"\n\n"
                if fault == "half" and place == 1:
                    self.chunk(data[: len(data) // 2] + b"\n")
                    return self.close()
                if fault == "close" and place == 1:
                    self.chunk(data[:10])
                    return self.close()
                self.chunk(data)
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")

        def sglang(self, prompt, fault):
            lengths = LENGTHS[number(prompt) % 3]
            meta = {"completion_tokens": TOKENS, "finish_reason": {"type": "length"}, "e2e_latency": 0.1}
            if state.counters:
                meta |= {
                    "spec_verify_ct": len(lengths),
                    "spec_num_correct_drafts": sum(lengths),
                    "spec_num_proposed_drafts": K * len(lengths),
                    "spec_correct_drafts_histogram": [lengths.count(j) for j in range(max(lengths) + 1)],
                }
            yield {"text": state.text, "meta_info": {"completion_tokens": 1, "finish_reason": None}}
            yield {"meta_info": meta} if fault == "fields" else {"text": state.text * TOKENS, "meta_info": meta}

        def vllm(self, prompt, fault):
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            for _ in range(TOKENS):
                yield {"choices": [{"delta": {"content": state.text}, "finish_reason": None}]}
            if fault == "fields":
                yield {"object": "chat.completion.chunk"}
            state.served(prompt)
            yield {"choices": [{"delta": {}, "finish_reason": "length"}]}
            yield {"choices": [], "usage": {"completion_tokens": TOKENS}}

        def chunk(self, data):
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def close(self):
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
