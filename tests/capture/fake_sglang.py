"""Stands for SGLang: a ForwardBatch with the fields that the hook reads, and passes as its scheduler makes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor


@dataclass
class ForwardBatch:
    """Fields of SGLang 0.5.23's ForwardBatch; decode passes have no extend lengths."""

    rids: list[str]
    input_ids: Tensor
    extend_seq_lens_cpu: list[int] | None
    extend_prefix_lens_cpu: list[int] | None


@dataclass
class Engine:
    """Calls a hook as SGLang's logits processor would.

    Attributes:
        states: token ids [T] -> (aux per point, last), of one whole request.
        packed: aux as one tensor (DeepSeek files) instead of a list.
        kimi: argument 0 is None.
        padding: rows of garbage behind each pass.
        sent: rows of every pass.
    """

    hook: Callable[..., Any]
    states: Callable[[Tensor], tuple[list[Tensor], Tensor]]
    packed: bool = False
    kimi: bool = False
    padding: int = 0
    sent: list[list[tuple[str, int, int]]] = field(default_factory=list)

    def pass_over(self, parts: Sequence[tuple[str, Tensor, int, int]]) -> Any:
        """One prefill pass over rows `start` to `stop` of some requests: (rid, all token ids, start, stop)."""
        self.sent.append([(rid, start, stop) for rid, _, start, stop in parts])
        made = [self.states(ids) for _, ids, _, _ in parts]
        last = torch.cat([last[start:stop] for (_, last), (_, _, start, stop) in zip(made, parts, strict=True)])
        points = range(len(made[0][0]))
        aux = [torch.cat([m[0][p][part[2] : part[3]] for m, part in zip(made, parts, strict=True)]) for p in points]
        ids = torch.cat([ids[start:stop] for _, ids, start, stop in parts])
        if self.padding:
            last, *aux = (torch.cat([t, torch.full((self.padding, t.shape[1]), torch.nan)]) for t in (last, *aux))
            ids = torch.cat([ids, torch.zeros(self.padding, dtype=ids.dtype)])
        lengths, prefixes = [stop - start for *_, start, stop in parts], [start for *_, start, _ in parts]
        batch = ForwardBatch([rid for rid, *_ in parts], ids, lengths, prefixes)
        given = torch.cat(aux, -1) if self.packed else aux
        return self.hook(None, (None if self.kimi else ids, last, None, batch, given), None)

    def decode(self, rids: list[str], hidden: int) -> Any:
        """One decode pass: a row for each request, nothing to be stored."""
        batch = ForwardBatch(rids, torch.zeros(len(rids), dtype=torch.int64), None, None)
        states = torch.zeros(len(rids), hidden)
        return self.hook(None, (batch.input_ids, states, None, batch, [states] * 3), None)

    def run(self, requests: Sequence[tuple[str, Tensor]], chunk: int) -> None:
        """All requests, `chunk` rows a pass at most, requests cut where a pass is full."""
        for parts in chunked([(rid, ids, len(ids)) for rid, ids in requests], chunk):
            self.pass_over(parts)


def chunked(requests: list[tuple[str, Tensor, int]], chunk: int) -> Iterator[list[tuple[str, Tensor, int, int]]]:
    parts: list[tuple[str, Tensor, int, int]] = []
    room = chunk
    for rid, ids, length in requests:
        start = 0
        while start < length:
            stop = min(length, start + room)
            parts.append((rid, ids, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield parts
                parts, room = [], chunk
    if parts:
        yield parts


class FakeServer:
    """`/generate` over HTTP: requests that wait together are run together, then the hook has seen their rows."""

    def __init__(self, engine: Engine, chunk: int = 16) -> None:
        self.engine, self.chunk, self.requests = engine, chunk, 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.requests += 1
                    fake.engine.run([(body["rid"], torch.tensor(body["input_ids"]))], fake.chunk)
                answer = json.dumps({"text": "x", "meta_info": {"id": body["rid"]}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
