"""What notebook 06 ends with: the doctor's word on both launch lines, and the case in one paragraph."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from eagle3lab.acceptance.counts import total
from eagle3lab.runs.directory import Run
from eagle3lab.steps.case_decode import ALGORITHMS, Case
from eagle3lab.steps.case_evidence import Evidence
from eagle3lab.steps.doctor import Visit, look
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.profiles import load_profile

if TYPE_CHECKING:
    from eagle3lab.acceptance.flags import Algorithm


def launch_line(algorithm: Algorithm, draft: str, k: int = 3) -> str:
    """The launch line of the case, with one flag right or wrong."""
    return (
        f"python3 -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(draft)} --speculative-num-steps {k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {k + 1}"
    )


def ask_doctor(run: Run, algorithm: Algorithm) -> Visit:
    """What `eagle3lab doctor --launch "..." --draft DRAFTER` says of that line and the run's drafter."""
    run.require("train")
    draft = str(run.drafter)
    target = str(fetched_folder(load_profile(run.manifest.profile)))
    return look(launch=launch_line(algorithm, draft), draft=draft, target=target, engine="sglang")


def result(case: Case, visits: dict[str, Visit], pair: tuple[Evidence, Evidence]) -> str:
    """Result of notebook 06: what was seen, what named it, what to type."""
    wrong, right = (case.served[flag].counts for flag in ALGORITHMS)
    lines = [
        f"**Result.** Served as EAGLE the drafter had {wrong.accepted} of {wrong.proposed} drafts accepted and fc was "
        f"called {len(case.served['EAGLE'].fc_inputs)} times; as EAGLE3, with the same weights and prompts, "
        f"{right.accepted} of {right.proposed} and {len(case.served['EAGLE3'].fc_inputs)} times. "
        f"{case.lossless('EAGLE')} and {case.lossless('EAGLE3')} of {len(case.plain)} replies equal plain decoding: "
        "the text does not tell the two apart."
    ]
    if case.meaningless:
        lines.append("The target is random: how many drafts it accepts has no meaning, what reaches fc has.")
    real = {one.algorithm: total(one.counts.values()) for one in pair if one.counts}
    if real:
        told = "; ".join(f"as {flag} {one.accepted} of {one.proposed}" for flag, one in real.items())
        lines.append(f"A real SGLang (committed evidence): {told} drafts accepted.")
    errors = [finding for finding in visits["EAGLE"].as_json()["findings"] if finding["severity"] == "error"]
    for finding in errors:
        lines.append(f"The doctor: `{finding['code']}`: {finding['message']}. Fix: `{finding['fix']}`.")
    if not errors:
        lines.append("The doctor found no error in the wrong launch line: tell us, it should.")
    lines.append('With your own server: `eagle3lab doctor --launch "..." --draft FOLDER --target FOLDER`.')
    return "\n\n".join(lines)
