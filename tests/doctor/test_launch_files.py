"""Files that hold a launch line, and the environment that a launch line gives its server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.environment import read_env
from eagle3lab.doctor.run import Inputs, collect

from .launched import EAGLE3, SIMULATE, told, unsettled

WRONG, INVENTED = ("error", "launch-algorithm"), ("error", "env-simulated-acceptance")
FLAGS = "--model-path=T, --speculative-draft-model-path=D"
KUBERNETES = f"""
kind: Service
metadata: {{name: s}}
---
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: server
        env:
        - {{name: ALGO, value: ALG}}
        - {{name: TOKEN, valueFrom: {{secretKeyRef: {{name: x}}}}}}
        command: [python3, -m, sglang.launch_server]
        args: [{FLAGS}, --speculative-algorithm, WRITTEN]
---
"""
SCRIPT = """
kind: Service
---
spec:
  containers:
  - env: [{name: ALGO, value: ALG}]
    command: [bash, -lc]
    args:
    - |
      set -e
      exec python3 -m sglang.launch_server --model-path T --speculative-draft-model-path D \\
        --speculative-algorithm $ALGO
"""
COMPOSE = """
services:
  s:
    environment: {ALGO: ALG}
    command: >
      bash -c "python3 -m sglang.launch_server --model-path T --speculative-draft-model-path D
      --speculative-algorithm $$ALGO"
"""
UNIT = """[Unit]
Description=the lab's server
[Service]
Environment=ALGO=ALG "B=c d"
ExecStart=/usr/bin/python3 -m sglang.launch_server --model-path T \\
  --speculative-draft-model-path D --speculative-algorithm ${ALGO}
"""
DOCKERFILE = """# it's ours
ARG TAG=latest
FROM lmsysorg/sglang:$TAG AS base
ENV ALGO=ALG
RUN echo it's && true
"""
WORDS = '"python3", "-m", "sglang.launch_server", "--model-path", "T", "--speculative-draft-model-path", "D"'
PYTHON = f"import subprocess  # it's\nsubprocess.run([{WORDS}, '--speculative-algorithm', 'ALG', '--tp', TP])\n"
LAYOUTS: dict[str, str] = {
    "parentheses.yaml": KUBERNETES.replace("WRITTEN", "$(ALGO)"),
    "dollar.yaml": KUBERNETES.replace("WRITTEN", "$ALGO"),
    "braces.yml": KUBERNETES.replace("WRITTEN", '"${ALGO}"'),
    "script.yaml": SCRIPT,
    "compose.yaml": COMPOSE,
    "values.yaml": f"replicas: 1\nsglang:\n  extraArgs: [{FLAGS}, --speculative-algorithm=ALG]\n",
    "values-text.yaml": f"sglang:\n  extraArgs: {FLAGS.replace(',', '')} --speculative-algorithm=ALG\n",
    "section.yaml": "image: {x: y}\nsglang: {speculative_algorithm: ALG, speculative_draft_model_path: D}\n",
    "sky.yaml": f"envs: {{A: b}}\nrun: |\n  python3 -m sglang.launch_server {FLAGS.replace(',', '')} "
    "--speculative-algorithm ALG\n",
    "x.service": UNIT,
    "Dockerfile": DOCKERFILE + f'CMD [{WORDS}, "--speculative-algorithm", "ALG"]\n',
    "Dockerfile.entry": DOCKERFILE + f'ENTRYPOINT [{WORDS}]\nCMD ["--speculative-algorithm", "ALG"]\n',
    "Dockerfile.shell": DOCKERFILE + "CMD python3 -m sglang.launch_server --model-path T \\\n"
    "  --speculative-draft-model-path D --speculative-algorithm $ALGO\n",
    "serve.py": PYTHON,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(LAYOUTS[name].replace("ALG}", "EAGLE}").replace("ALG", "EAGLE").replace("EAGLEO", "ALGO"))
    assert told(str(path)) == [WRONG]
    path.write_text(LAYOUTS[name].replace("ALG", "EAGLE3").replace("EAGLE3O", "ALGO"))
    assert told(str(path)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("values.yaml", "image: {tag: x}\nsglang: {replicas: 2}\n"),
        ("service.yaml", "kind: Service\n---\nkind: ConfigMap\ndata: {a: b}\n"),
        ("Dockerfile", 'FROM nginx\nCMD ["nginx", "-g", "daemon off;"]\n'),
        ("train.py", "import torch\n# it's\nprint(1)\n"),
        ("build.sh", "make -j4\n"),
        ("x.service", "[Service]\nExecStart=/usr/bin/nginx -g x\n"),
    ],
)
def test_files_without_a_server(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert told(str(tmp_path / name)) == []
    said = unsettled(str(tmp_path / name))
    assert len(said) == 1 and "no server command found" in said[0]


@pytest.mark.parametrize(
    ("line", "invented"),
    [
        (f"{SIMULATE}=2.5 {EAGLE3}", True),
        (f"SGL_SIMULATE_ACC_LEN=2.5 {EAGLE3}", True),
        (f"docker run -e{SIMULATE}=2 img {EAGLE3}", True),
        (f"docker run -e {SIMULATE}=2 img bash -c '{EAGLE3}'", True),
        (f"docker run --env={SIMULATE}=2 img {EAGLE3}", True),
        (f"docker run --env {SIMULATE}=2 img {EAGLE3}", True),
        (f"srun --export=ALL,{SIMULATE}=2 {EAGLE3}", True),
        (f"srun --export ALL,A=1,{SIMULATE}=2 {EAGLE3}", True),
        (f"mpirun -x {SIMULATE}=2 {EAGLE3}", True),
        (f'declare -x {SIMULATE}="2"\n{EAGLE3}', True),
        (f"export A=1 {SIMULATE}=2 && {EAGLE3}", True),
        (f"main() {{ export {SIMULATE}=2\n{EAGLE3}; }}\nmain", True),
        (f"{SIMULATE}=-1 {EAGLE3}", False),
        (f"env {SIMULATE}=-1 {EAGLE3}", False),
        (f"env -u {SIMULATE} {EAGLE3}", False),
        (f"unset {SIMULATE}; {EAGLE3}", False),
        (f"docker run -e {SIMULATE}=2 img bash -c 'unset {SIMULATE}; {EAGLE3}'", False),
        (f"export {SIMULATE}=2\npython bench.py\nunset {SIMULATE}\n{EAGLE3}", False),
        (f"{SIMULATE}=2 python bench.py --n 3\n{SIMULATE}=-1 {EAGLE3}", False),
        (f"if [ $BENCH ]; then export {SIMULATE}=2; fi\n{EAGLE3}", False),
        (f"{SIMULATE}=$ACC {EAGLE3}", False),
        (f"env -S '{SIMULATE}=2 {EAGLE3}'", True),
        (f"systemd-run --setenv={SIMULATE}=2 {EAGLE3}", True),
        (f"/usr/bin/env -i {SIMULATE}=2 {EAGLE3}", True),
        (f"declare -gx {SIMULATE}=2\n{EAGLE3}", True),
        (f"{SIMULATE}=2\nexport A {SIMULATE}\n{EAGLE3}", True),
        (f"set -eax\n{SIMULATE}=2\nset +a\n{EAGLE3}", True),
        (f"set -o allexport; {SIMULATE}=2; {EAGLE3}", True),
        (f"export {SIMULATE}=-1\n{SIMULATE}=2\n{EAGLE3}", True),
        (f"(export {SIMULATE}=2; cd /x; {EAGLE3}) &", True),
        (f"export {SIMULATE}=2\nenv -i PATH=/bin {EAGLE3}", False),
        (f"export {SIMULATE}=2; export -n {SIMULATE}; {EAGLE3}", False),
        (f"declare -x {SIMULATE}=2\ndeclare +x {SIMULATE}\n{EAGLE3}", False),
        (f"export {SIMULATE}=-1; (export {SIMULATE}=2; python bench.py); {EAGLE3}", False),
    ],
)
@pytest.mark.parametrize("outside", ["-1", "2.5"])
def test_what_the_server_sees(line: str, invented: bool, outside: str) -> None:
    wanted = [INVENTED] if invented else []
    assert told(launch_args=line, env={SIMULATE: outside}) == wanted
    assert told(line, env={SIMULATE: outside}) == wanted
    if "\n" not in line and line.startswith(("env", "SGL")):
        assert told(launch_args=shlex.split(line), env={SIMULATE: outside}) == wanted


@pytest.mark.parametrize(
    ("env", "invented"),
    [
        ({"SGL_SIMULATE_ACC_LEN": "3.0"}, True),
        ({"SGL_SIMULATE_ACC_LEN": "3.0", SIMULATE: "-1"}, True),
        ({"SGL_SIMULATE_ACC_LEN": "-1", SIMULATE: "3.0"}, False),
        ({"SGL_SIMULATE_ACC_METHOD": "multinomial"}, False),
        ({"SGL_SIMULATE_ACC_LEN": None, SIMULATE: ""}, False),
    ],
)
def test_the_older_name_counts_over_the_newer(env: dict[str, Any], invented: bool) -> None:
    assert told(env=env, command="accept served") == ([INVENTED] if invented else [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.env", 'declare -x SHLVL\ndeclare -x NAME="3.0"\n'),
        ("a.env", "NAME='3.0' # bench\n"),
        ("a.env", 'export NAME="3.0"  # it\'s\n'),
        ("a.env", 'Environment="NAME=3.0"\n'),
        ("a.env", "ENV NAME=3.0\n"),
        ("environ", "A=1\0NAME=3.0\0B=x\nNAME=4\0"),
        ("pod.yaml", "env:\n- {name: NAME, value: '3.0'}\n- {name: X, valueFrom: {}}\n"),
        ("list.yaml", "- name: NAME\n  value: '3.0'\n"),
        ("two.yaml", "kind: Service\n---\nspec: {containers: [{env: [{name: NAME, value: '3.0'}]}]}\n"),
        ("pod", "env:\n- name: NAME\n  value: '3.0'\n"),
        ("inspect.json", '[{"Config": {"Env": ["NAME=3.0", "PATH=/bin"]}}]'),
        ("flat.yaml", "NAME: '3.0'\n"),
    ],
)
def test_files_of_variables(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text.replace("NAME", SIMULATE))
    facts = Facts()
    read_env(str(tmp_path / name), facts)
    assert facts["env"][SIMULATE] == "3.0" and not facts.remarks


def test_the_launch_line_counts_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text(f"{SIMULATE}=3\nA=1\n")
    facts = collect(Inputs(launch=f"unset {SIMULATE}; B=2 {EAGLE3}", env=str(tmp_path / "a.env")))
    assert facts["env"] == {"A": "1", "B": "2"}


@pytest.mark.parametrize(("outside", "invented"), [({}, False), ({SIMULATE: "-1"}, True)])
@pytest.mark.parametrize("before", ["", "set -a; set +a\n", "declare -i N=1\n"])
def test_a_variable_that_is_not_exported(before: str, outside: dict[str, Any], invented: bool) -> None:
    line = f"{before}{SIMULATE}=2\n{EAGLE3}"
    wanted = [INVENTED] if invented else []  # one that comes from outside stays exported
    assert told(line, env=outside) == wanted
    assert told(launch_args=line, env=outside) == wanted


@pytest.mark.parametrize(
    ("name", "lines", "invented"),
    [
        ("x.service", f"Environment={SIMULATE}=0\nEnvironment={SIMULATE}=2", True),
        ("x.service", f"Environment={SIMULATE}=2\nEnvironment=", False),
        ("x.service", f'Environment="{SIMULATE}=2" A=b\nUnsetEnvironment=A {SIMULATE}', False),
        ("x.service", f"Environment={SIMULATE}=2\nUnsetEnvironment=A", True),
        ("Dockerfile", f"FROM x\nENV A=b \\\n# {SIMULATE}=-1 \\\n  {SIMULATE}=2", True),
        ("Dockerfile", f"FROM x\nENV A=b \\\n# {SIMULATE}=2 \\\n  {SIMULATE}=-1", False),
    ],
)
def test_what_a_unit_and_a_dockerfile_set(name: str, lines: str, invented: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(f"[Service]\n{lines}\nExecStart={EAGLE3}\n" if name == "x.service" else f"{lines}\nCMD {EAGLE3}\n")
    assert told(str(path)) == ([INVENTED] if invented else [])


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
def test_comments_between_the_lines_of_a_command(name: str, tmp_path: Path) -> None:
    other = "EAGLE" if name == "EAGLE3" else "EAGLE3"
    line = (
        f"python3 -m sglang.launch_server \\\n  # --speculative-algorithm {other} \\\n  --speculative-algorithm {name}"
    )
    line += " --speculative-draft-model-path D"
    wanted = [WRONG] if name == "EAGLE" else []
    for file, text in {"x.service": f"[Service]\nExecStart={line}\n", "Dockerfile": f"FROM x\nCMD {line}\n"}.items():
        (tmp_path / file).write_text(text)
        assert told(str(tmp_path / file)) == wanted, file


@pytest.mark.parametrize(("run", "refused"), [("' '.join(cmd), shell=True", False), ("cmd", True)])
def test_flag_and_value_in_one_item_of_a_python_list(run: str, refused: bool, tmp_path: Path) -> None:
    path = tmp_path / "serve.py"
    head, _, tail = EAGLE3.partition(" --speculative-algorithm")
    words = [*head.split(), *f"--speculative-algorithm{tail}".replace(" --", "\n--").split("\n")]
    path.write_text(f"import subprocess\ncmd = {words!r}\nsubprocess.run({run})\n")
    codes = {code for severity, code in told(str(path)) if severity == "error"}
    assert codes == ({"launch-options"} if refused else set())
