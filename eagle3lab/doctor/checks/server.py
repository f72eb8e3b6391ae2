"""A running server: what it says it runs."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.acceptance.sources import GAUGE_INTERVAL
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import items, mapping, real


@check(
    code="server-speculation",
    title="speculation of a running server",
    reads=("server",),
    rule="the server speculates with the algorithm that the draft was made for",
    fix="restart the server with --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT",
    symptom="no speed-up; the answers hold no acceptance counter",
)
def speculation(facts: Facts) -> Iterator[Finding]:
    """Algorithm in force, draft, and the gauges that the server keeps."""
    server = mapping(facts.get("server"))
    engine, algorithm = str(server.get("engine"))[:20], server.get("algorithm")
    if server.get("speculating") is False or algorithm in (None, "", "NONE"):
        text = f"{engine} at {str(server.get('url'))[:80]} does not speculate"
        yield warning("server", text, actual=algorithm, algorithm=None)
        return
    draft = server.get("draft")
    said = f", draft {str(draft)[:120]}" if draft else ""
    yield info("server", f"{engine} runs {str(algorithm)[:40]}{said}", algorithm=algorithm, draft=draft)
    gauges = [value for item in items(server.get("gauges")) if (value := real(item)) is not None]
    if gauges:
        text = f"its gauge says {min(gauges):g} to {max(gauges):g}: it lags by up to {GAUGE_INTERVAL} decode steps"
        yield info("server", f"{text}, and ranks are not weighted", gauges=gauges)
