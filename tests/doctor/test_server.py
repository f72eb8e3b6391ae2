"""`doctor --server` against local servers that behave, lie, break off and hang."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.facts import parse_engine
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.readers import server as reader
from eagle3lab.doctor.run import Inputs, visit

from .test_artefacts import sample, write_states

Answer = bytes | Callable[[BaseHTTPRequestHandler], None]
ZERO = {"completion_tokens": 64, "spec_verify_ct": 63, "spec_num_correct_drafts": 0, "spec_num_proposed_drafts": 189}
WORKS = {**ZERO, "spec_verify_ct": 40, "spec_num_correct_drafts": 24, "spec_num_proposed_drafts": 120}


def info(algorithm: str | None, **more: Any) -> bytes:
    settings = {"model_path": "/m", "speculative_algorithm": algorithm, "speculative_draft_model_path": "/d"}
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    return json.dumps({**settings, **chain, "version": "0.5.23", **more}).encode()


def answer(meta: Any) -> bytes:
    return json.dumps({"text": "one\ntwo", "meta_info": meta}).encode()


def page(drafts: int, accepted: int, *positions: int) -> bytes:
    rows = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0']
    rows += [f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * drafts}.0']
    rows += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0']
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    rows += [f'{name}{{engine="0",position="{j}"}} {count}.0' for j, count in enumerate(positions)]
    return "\n".join(rows).encode()


@contextmanager
def serving(pages: dict[str, Answer | list[Answer]]) -> Iterator[str]:
    """A server on a free loopback port; a list of answers is given one by one, the last one again and again."""
    turn = dict.fromkeys(pages, 0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            chosen = pages.get(self.path)
            if isinstance(chosen, list):
                place = min(turn[self.path], len(chosen) - 1)
                turn[self.path] += 1
                chosen = chosen[place]
            if chosen is None:
                self.send_error(404)
            elif callable(chosen):
                chosen(self)
            else:
                self.send_response(200)
                self.send_header("Content-Length", str(len(chosen)))
                self.end_headers()
                self.wfile.write(chosen)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def log_message(self, *arguments: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def visit_server(pages: dict[str, Any]) -> Report:
    with serving(pages) as url:
        return visit(Inputs(server=url))


def errors(report: Report) -> dict[str, str]:
    return {f.code: f.message for f in report.findings if f.severity == "error"}


def test_sglang_with_zero_acceptance() -> None:
    report = visit_server(
        {"/server_info": info("EAGLE3"), "/generate": answer({**ZERO, "spec_accept_length": 64 / 63})}
    )
    assert "no draft accepted in 63 verify steps" in errors(report)["accept-answer"]
    assert "64/63" in errors(report)["accept-answer"]


def test_sglang_that_works_is_quiet() -> None:
    report = visit_server({"/server_info": info("EAGLE3"), "/generate": answer(WORKS)})
    assert [f.message for f in report.findings if f.severity != "info"] == []
    assert any("accept length 1.6" in f.message for f in report.findings)
    assert any("sglang runs EAGLE3" in f.message for f in report.findings)


def test_older_spellings_of_sglang() -> None:
    nested = json.dumps(
        {"server_args": json.loads(info("EAGLE3")), "internal_states": [{"avg_spec_accept_length": 2.5}]}
    )
    report = visit_server({"/get_server_info": nested.encode(), "/generate": b"[" + answer(WORKS) + b"]"})
    assert errors(report) == {}
    assert any("gauge says 2.5" in f.message for f in report.findings)


def test_the_flag_in_force_is_judged(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1})
    )
    with serving({"/server_info": info("EAGLE"), "/generate": answer(ZERO)}) as url:
        report = visit(Inputs(server=url, draft=str(tmp_path / "config.json")))
    assert "EAGLE3" in errors(report)["launch-algorithm"]


def test_speculation_that_is_off_is_unknown_and_not_zero() -> None:
    report = visit_server({"/server_info": info(None), "/generate": answer({"completion_tokens": 64})})
    assert errors(report) == {}
    assert any(f.code == "server-speculation" and f.severity == "warning" for f in report.findings)
    assert any("acceptance is unknown" in f.message for f in report.findings)


def test_vllm_counts_are_the_difference_over_one_prompt() -> None:
    pages = {"/v1/models": b'{"data": [{"id": "m"}]}', "/v1/completions": b"{}"}
    metrics = [page(100, 90, 60, 20, 10), page(140, 90, 60, 20, 10)]
    assert (
        "no draft accepted in 40 verify steps" in errors(visit_server({**pages, "/metrics": metrics}))["accept-report"]
    )
    metrics = [page(100, 90, 60, 20, 10), page(140, 120, 80, 28, 12)]
    report = visit_server({**pages, "/metrics": metrics})
    assert errors(report) == {}
    assert any("accept length 1.75" in f.message for f in report.findings)  # the whole page would say 1.857


def test_vllm_counters_that_lag_behind_the_answer() -> None:
    """Read at once they stand still, or hold one counter's step and not the next one's."""
    pages = {"/v1/models": b'{"data": [{"id": "m"}]}', "/v1/completions": b"{}"}
    early, torn, whole = page(100, 90, 60, 20, 10), page(101, 90, 62, 22, 12), page(140, 120, 80, 28, 12)
    for lag in ([early], [torn], [early, torn]):
        report = visit_server({**pages, "/metrics": [early, *lag, whole]})
        assert any("accept length 1.75" in f.message for f in report.findings), lag


def test_vllm_that_was_restarted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SETTLE_SECONDS", 0.1)
    pages = {"/v1/models": b'{"data": [{"id": "m"}]}', "/v1/completions": b"{}"}
    report = visit_server({**pages, "/metrics": [page(100, 90), page(140, 30)]})
    assert any("could not check acceptance of one prompt" in f.message for f in report.findings)


@pytest.mark.parametrize(
    ("noise", "rows", "code"), [(0.0, 5, ""), (9.0, 5, "states-batch-1"), (0.0, 1, "states-generated-rows")]
)
def test_stored_states_against_a_capture_at_batch_1(tmp_path, noise: float, rows: int, code: str) -> None:
    stored = sample(2, 5)
    folder = write_states(tmp_path / "s", [sample(1, 9), stored])
    fresh = stored[1].copy()
    fresh[2] += noise * np.arange(fresh.shape[1])
    capture = {**WORKS, "hidden_states": [fresh[-rows:].tolist()]}
    pages = {"/server_info": info("EAGLE3", enable_return_hidden_states=True)}
    with serving({**pages, "/generate": [answer(WORKS), answer(capture)]}) as url:
        report = visit(Inputs(server=url, states=str(folder)))
    assert set(errors(report)) == ({code} if code else set())
    with serving({"/server_info": info("EAGLE3"), "/generate": answer(WORKS)}) as url:
        report = visit(Inputs(server=url, states=str(folder)))
    assert any("the server returns no states" in f.message for f in report.findings)


def hang(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(1.5)


def half(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"meta_info": {"spec_ver')


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(15):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


def garbage(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x00\xffNOT HTTP\r\n\r\n")


@pytest.mark.parametrize(
    "bad", [hang, half, drip, garbage, b"", b"[1, 2]", b"{", b'{"meta_info": 3}', b"null", b"\xff" * 99]
)
def test_misbehaving_generate_is_a_remark(bad: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "GENERATE_SECONDS", 0.5)
    report = visit_server({"/server_info": info("EAGLE3"), "/generate": bad})
    assert any("could not check acceptance of one prompt" in f.message for f in report.findings)
    assert errors(report) == {}
    assert all("\n" not in f.message for f in report.findings)


@pytest.mark.parametrize(
    "bad", [hang, half, garbage, b"[]", b'{"speculative_algorithm": {"a": [1]}, "internal_states": 3}']
)
def test_misbehaving_server_info(bad: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SECONDS", 0.5)
    report = visit_server({"/server_info": bad, "/generate": answer({})})
    assert not [f for f in report.findings if f.code == "check-broken"]
    assert report.findings


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "ANSWER_LIMIT", 1000)
    report = visit_server({"/server_info": info("EAGLE3"), "/generate": b"x" * 5000})
    assert any("answered more than 1000 bytes" in f.message for f in report.findings)


def test_no_server_is_a_usage_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match="cannot be reached"):
        visit(Inputs(server=f"http://127.0.0.1:{port}"))
    with pytest.raises(UsageError, match="no URL"):
        visit(Inputs(server="file:///etc/passwd"))


def test_half_a_bracket_is_no_url() -> None:
    with pytest.raises(UsageError, match="no URL"):
        visit(Inputs(server="http://[::1"))


def test_an_engine_version_that_is_none() -> None:
    with pytest.raises(UsageError, match="unreadable engine version 'latest'"):
        parse_engine("sglang@latest")
