"""Scripts around the server: arrays, branches, functions, defaults, here-documents, commands within commands."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest

from eagle3lab.doctor.readers import shell
from eagle3lab.doctor.readers.launch import parse_args
from eagle3lab.doctor.run import Inputs, collect

from .launched import EAGLE, EAGLE3, SERVER, facts_of, findings, told, unsettled

SD = f"{SERVER} --speculative-draft-model-path D --speculative-algorithm"
WRONG = [("error", "launch-algorithm")]
REST = 'ARGS=(--speculative-algorithm {} --speculative-draft-model-path D)\nif [ "$V" ]; then ARGS+=({}); fi\n'


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    "text",
    [
        f"A=(--speculative-algorithm ALG)\nA+=(--speculative-draft-model-path D)\n{SERVER} \"${{A[@]}}\"",
        f"declare -a A=()\nA+=(--speculative-algorithm ALG)\nA+=(--speculative-draft-model-path D)\n{SERVER} ${{A[@]}}",
        f"readonly A=ALG\n{SD} $A",
        f"declare -r A=ALG\n{SD} $A",
        f"f() {{\n  local a=ALG\n  {SD} $a\n}}\nf",
        f"function f {{ local a=ALG; {SD} $a; }}\nf",
        f": \"${{A:=ALG}}\"\n{SD} $A",
        f"{SD} ${{A:=ALG}}",
        f"{SD} ${{1:-ALG}}",
        f"{SD} \"${{A:-'ALG'}}\"",
        f"B=ALG\n{SD} ${{A:-${{B}}}}",
        f"A=\n{SD} ${{A:-ALG}}",
        f"A=1\n{SERVER} --speculative-draft-model-path D ${{A:+--speculative-algorithm ALG}}",
        f"cd /x && A=ALG && {SD} $A",
        f"A=x; if [ $V ]; then A=ALG; else A=ALG; fi; {SD} $A",
        f"if [ $V ]; then\n  A=ALG\n  {SD} $A\nfi",
        f"case $1 in\n  kimi|llama)\n    A=ALG\n    ;;\n  *) A=ALG ;;\nesac\n{SD} $A",
        f"{{ A=ALG; }}; {SD} $A",
        f"A=$'ALG'; echo $'it\\'s'; {SD} $A",
        REST.format("ALG", "--log-level debug") + f'{SERVER} "${{ARGS[@]}}"',
        REST.format("ALG", "--log-level debug").replace("(", '"').replace(")", '"').replace('+="', '+=" ')
        + f"{SERVER} $ARGS",
    ],
)  # fmt: skip
def test_what_the_text_settles(text: str, name: str) -> None:
    facts = facts_of(text.replace("ALG", name))
    assert parse_args(facts["launch_args"]).value("speculative-algorithm") == name
    assert told(text.replace("ALG", name)) == (WRONG if name == "EAGLE" else [])


@pytest.mark.parametrize(
    "text",
    [
        f'EXTRA=""; if [ $V ]; then EXTRA="--speculative-algorithm EAGLE"; fi; {SERVER} $EXTRA',
        f"A=EAGLE; if [ $V ]; then A=EAGLE3; fi; {SD} $A",
        f"A=EAGLE\n[ $V = kimi ] && A=EAGLE3\n{SD} $A",
        f"A=EAGLE\n[[ -n $V && -n $W ]] || A=EAGLE3\n{SD} $A",
        f"A=EAGLE; case $1 in kimi) A=EAGLE3 ;; esac; {SD} ${{A:-EAGLE}}",
        f"for A in EAGLE EAGLE3; do {SD} $A; done",
        f"A=EAGLE; while read -r A; do {SD} $A; done < list",
        f"A=EAGLE; f() {{ A=EAGLE3; }}\nf\n{SD} $A",
        f"f() {{ {SD} ${{1:-EAGLE}}; }}\nf EAGLE3",
        REST.format("EAGLE", "--speculative-algorithm EAGLE3") + f'{SERVER} "${{ARGS[@]}}"',
    ],
)
def test_what_a_branch_sets_is_said_and_not_judged(text: str, tmp_path: Path) -> None:
    assert told(text) == told(launch_args=text) == []
    (tmp_path / "facts.json").write_text(json.dumps({"launch_args": text}))
    for said in (unsettled(text), [f.message for f in collect(Inputs(facts=str(tmp_path / "facts.json"))).remarks]):
        assert "nothing in the text says what it stands for" in said[0]


def test_a_local_name_ends_with_its_function() -> None:
    assert told(f"A=EAGLE3\nf() {{ local A=EAGLE; }}\nf\n{SD} $A") == []


@pytest.mark.parametrize(
    "text",
    [
        f"cat <<EOF > README\nIt's a server\nEOF\n{EAGLE3}",
        f"cat <<-'END' > README\n\tIt's {EAGLE}\n\tEND\n{EAGLE3}",
        f"cat << \"EOF\" | tee x\n{EAGLE}\nEOF\n{EAGLE3}",
        f"cat <<A <<B\nit's\nA\nisn't\nB\n{EAGLE3}",
        f"python - <<< \"it's\"\n{EAGLE3}",
    ],
)  # fmt: skip
def test_a_here_document_is_no_command(text: str) -> None:
    assert told(text) == []


def test_a_script_that_a_here_document_writes() -> None:
    assert told(f"cat > serve.sh <<'EOF'\n{EAGLE}\nEOF\nbash serve.sh") == WRONG


@pytest.mark.parametrize("line", [EAGLE, EAGLE3])
@pytest.mark.parametrize(
    "around",
    [
        'tmux new -d -s s "{}"',
        "screen -dmS s bash -lc '{}'",
        'ssh host "cd /x && {}"',
        'sbatch --wrap="{}"',
        "srun bash -c \"tmux new '{}'\"",
        'nohup sh -c "{} > log 2>&1" &',
        '{} &\nsleep 60\npython client.py --model T --speculative-num-steps 3 --speculative-algorithm EAGLE',
        '{} &\npython -m sglang.bench_serving --model T --num-prompts 8',
        'echo "python3 -m sglang.launch_server --speculative-algorithm EAGLE"\n{}',
        "pkill -f sglang.launch_server\n{}",
        'CMD="{}"\neval "$CMD"',
        "CMD=({})\n\"${{CMD[@]}}\" 2>&1 | tee log",
        "docker pull vllm/vllm-openai:latest\n{}",
    ],
)  # fmt: skip
def test_the_server_is_found(around: str, line: str) -> None:
    wanted = WRONG if line == EAGLE else []
    assert told(around.format(line)) == wanted
    assert told(launch_args=around.format(line)) == wanted
    assert unsettled(around.format(line)) == []


def test_the_client_of_vllm_is_no_server() -> None:
    text = "vllm serve T --spec-method eagle --spec-model D --spec-tokens 3 &\nvllm bench serve --model T --port 8000"
    assert told(launch_args=text) == WRONG


@pytest.mark.parametrize("shell_name", ["bash", "/bin/sh", "zsh"])
def test_words_of_a_shell(shell_name: str) -> None:
    assert told(launch_args=[shell_name, "-c", EAGLE]) == WRONG
    assert told(launch_args=[shell_name, "-lc", f"set -e\nexec {EAGLE3}"]) == []


def test_a_line_that_begins_with_a_flag_goes_on() -> None:
    text = "--model-path T\n  --speculative-algorithm {}  # which\n\n# the draft\n--speculative-draft-model-path D\n"
    assert told(launch_args=text.format("EAGLE")) == WRONG
    assert told(launch_args=text.format("EAGLE3")) == []
    assert len(parse_args(text).flags) == 3
    assert parse_args("python3 -m sglang.launch_server\n-tp 8\n--model-path T\nls").flags["tp"] == ["8"]


@pytest.mark.parametrize("text", ["python3 train.py --lr 3", "tmux new -d -s s", "make -j4 all"])
def test_no_server_is_said(text: str) -> None:
    assert told(text) == []
    [said] = unsettled(text)
    assert "no server command found" in said


@pytest.mark.parametrize("piece", ["${", "<<A\n", "${A:-", "$(", "if x; then\n", "A+=(", "case x in a)\n"])
def test_hostile_texts_end(piece: str) -> None:
    begun = time.monotonic()
    with contextlib.suppress(ValueError):
        shell.commands(piece * 30_000)
    assert time.monotonic() - begun < 20


CUT = [
    "{head} \\\n  --tp 8\n  --speculative-algorithm EAGLE3 \\\n  --speculative-draft-model-path D\n",
    "{head} \\ \n  --speculative-algorithm EAGLE3 \\\n  --speculative-draft-model-path D\n",
    "{head} \\\n  # the draft\n  --speculative-algorithm EAGLE3 \\\n  --speculative-draft-model-path D\n",
    "bash -c '{head} \\\n  # the draft\n  --speculative-algorithm EAGLE3 --speculative-draft-model-path D'\n",
]
WHOLE = [
    "{head} \\\n  --speculative-algorithm EAGLE3 \\\n  --speculative-draft-model-path D  # the draft\n\nls \\\n -l\n",
    "{head} \\\n  --speculative-algorithm EAGLE3 \\\n  --speculative-draft-model-path D \\\n\n# next\necho x\n",
    "{head} \\\r\n  --speculative-algorithm EAGLE3 \\\r\n  --speculative-draft-model-path D\r\n",
    "{head}\n  --speculative-algorithm EAGLE3  # pasted from a table\n  --speculative-draft-model-path D\n",
    "ls \\\n -l\n{head}\n  --speculative-algorithm EAGLE3\n  --speculative-draft-model-path D\n",
]


@pytest.mark.parametrize("text", CUT)
def test_a_command_that_a_shell_cuts(text: str) -> None:
    [finding] = [f for f in findings(text.format(head=SERVER)) if f.severity in ("error", "warning")]
    assert finding.code == "artefact-broken"
    assert "the line before --speculative-algorithm does not end with a backslash" in finding.message


@pytest.mark.parametrize("text", WHOLE)
def test_a_command_that_a_shell_reads_whole(text: str) -> None:
    assert told(text.format(head=SERVER)) == []


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
def test_a_subshell_keeps_its_variables(name: str) -> None:
    flags = "--speculative-algorithm $A --speculative-draft-model-path D"
    wanted = [("error", "launch-algorithm")] if name == "EAGLE" else []
    other = "EAGLE" if name == "EAGLE3" else "EAGLE3"
    assert told(f"A={name}\n(A={other}; echo $A)\n{SERVER} {flags}\n") == wanted
    assert told(f"A={other}\n(A={name}\n{SERVER} {flags}) &\nwait\n") == wanted


@pytest.mark.parametrize("line", [EAGLE, EAGLE3])
@pytest.mark.parametrize(
    "text",
    [
        "```bash\n{}\n```",
        "Start the server, it's this:\n\n~~~\n$ {}\n~~~\nand don't stop it.\n",
        "1. install\n   ```sh\n   pip install x\n   ```\n2. serve\n   ```\n   {}\n   ```\n",
        "`{}`",
        "docker run --gpus all `\n  lmsysorg/sglang `\n  {}",
        "{} ^\r\n  --tp 8 ^\r\n  --port 30000",
        "{} `\n  --tp 8 `\n  --port 30000",
    ],
)
def test_lines_copied_from_a_page_or_another_shell(text: str, line: str) -> None:
    wanted = [("error", "launch-algorithm")] if line == EAGLE else []
    assert told(text.format(line)) == wanted
