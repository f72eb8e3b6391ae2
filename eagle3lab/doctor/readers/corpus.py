"""`--corpus FILE` and `--tokenizer DIR`: training data in JSON lines, and what the tokenizer's template makes of it.

Rows are read in the forms of the field: `messages` or `conversations` (role and content, or from and value), `prompt`
and `reply` (texts or turns), `text`, or ready `input_ids` with `loss_mask` or `labels`. A JSON array is read as its
rows. Of a long file the first `ROWS` rows are looked at.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import TEXT_LIMIT, ReadError, decoded, encoding_of, read_json, read_text
from eagle3lab.doctor.run import existing
from eagle3lab.doctor.templates import (
    commonest,
    fitting,
    has_delimiters,
    hits,
    likely,
    only_thinks,
    replies,
    still_thinks,
    turn_openers,
)
from eagle3lab.doctor.views import items, mapping

ROWS = 2000
IGNORED = -100
"""The label that the cross-entropy of every common trainer leaves out."""
LOOKED_AT = 100_000
"""Characters of a text in which its delimiters are counted."""
RENDERED = 300
"""Rows that are rendered with the tokenizer: enough to see a mask that is empty or a template that fails."""
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def read(value: str, facts: Facts) -> None:
    """Add `corpus`: counts over rows, and `samples_supervised_tokens` where rows carry their own mask."""
    path = existing(value, "--corpus")
    if path.is_dir():
        files = sorted(file for kind in ("*.jsonl", "*.jsonl.gz") for file in path.glob(kind))
        fix = f"eagle3lab doctor --corpus {files[0]}" if files else "give --corpus a .jsonl file"
        facts.broken(str(path), f"is a folder; JSON lines in it: {len(files)} files", fix=fix)
        return
    try:
        values, complete = _values(path)
    except (OSError, EOFError, ReadError, UnicodeDecodeError) as error:
        why = f"cannot be read ({str(getattr(error, 'what', error))[:160]})"
        facts.broken(str(path), why, fix=getattr(error, "fix", ""))
        return
    rows: list[Mapping[str, Any]] = [value for value in values if isinstance(value, dict)]
    broken = [number for number, value in enumerate(values, 1) if not isinstance(value, dict)]
    if not complete:
        facts.could_not(f"rows of {path.name} after the first {len(rows)}", f"a visit reads {ROWS} rows")
    report = summary(rows)
    facts.put("corpus", {**report, "broken_lines": broken[:50], "path": str(path)}, str(path))
    supervised = [sum(marks) for row in rows if (marks := _marks(row)) is not None]
    if supervised and not facts.has("samples_supervised_tokens"):
        facts.put("samples_supervised_tokens", supervised, f"{path}: loss_mask or labels")


def _values(path: Path) -> tuple[list[Any], bool]:
    """(the first `ROWS` values, None for a line that is no JSON; whether those are all); a .gz is unpacked up to the
    limit, not further."""
    opener = gzip.open if path.suffix == ".gz" else open
    if not path.is_file():
        raise ReadError(f"{path} is not a regular file")
    with opener(path, "rb") as handle:
        raw = handle.read(TEXT_LIMIT + 1)
    if encoding_of(raw) == "utf-16":
        raise ReadError(f"{path} is UTF-16, not UTF-8", rule="trainers read UTF-8", fix="save it as UTF-8")
    text = decoded(raw[:TEXT_LIMIT])
    complete = len(raw) <= TEXT_LIMIT
    if (array := _array(text, complete)) is not None:
        return array
    lines = text.splitlines()
    kept = [line for line in (lines if complete else lines[:-1]) if line.strip()]
    return [_parsed(line) for line in kept[:ROWS]], complete and len(kept) <= ROWS


def _array(text: str, complete: bool) -> tuple[list[Any], bool] | None:
    """(the first `ROWS` items of a JSON array, whether those are all), None when the text is something else.

    Of an array that is cut off, not of lines that are arrays, the items that are whole are taken.
    """
    if not text.lstrip().startswith("["):
        return None
    if complete:
        whole = _parsed(text)
        return (whole[:ROWS], len(whole) <= ROWS) if isinstance(whole, list) else None
    if _parsed(text.partition("\n")[0]) is not None:
        return None
    items: list[Any] = []
    at = text.index("[") + 1
    while len(items) < ROWS and at < len(text):
        start = next((place for place in range(at, len(text)) if text[place] not in ", \t\r\n"), at)
        try:
            value, at = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            break
        items.append(value)
    return (items, False) if items else None


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _ids(row: Mapping[str, Any], key: str) -> list[Any] | None:
    """The list under this key (a batch of one is unpacked), None when there is none."""
    value = row.get(key)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value if isinstance(value, list) else None


def _marks(row: Mapping[str, Any]) -> list[bool] | None:
    """Which tokens the row itself supervises: by its loss_mask, else by labels other than -100."""
    if (mask := _ids(row, "loss_mask")) is not None:
        return [bool(mark) for mark in mask]
    labels = _ids(row, "labels")
    return None if labels is None else [label != IGNORED for label in labels]


def _no_numbers(row: Mapping[str, Any]) -> bool:
    """Whether ready lists hold something that is no token id, no mark of 0 or 1, or no label."""
    ids, mask, labels = (_ids(row, key) or [] for key in ("input_ids", "loss_mask", "labels"))
    return (
        any(type(one) is not int or one < 0 for one in ids)
        or any(not isinstance(mark, (bool, int, float)) or not 0 <= mark <= 1 for mark in mask)
        or any(type(label) is not int or (label < 0 and label != IGNORED) for label in labels)
    )


def _contradicts(row: Mapping[str, Any]) -> bool:
    """Whether a row has a mask and labels, of one length, that supervise different tokens."""
    mask, labels = _ids(row, "loss_mask"), _ids(row, "labels")
    if mask is None or labels is None or len(mask) != len(labels):
        return False
    return any(bool(mark) != (label != IGNORED) for mark, label in zip(mask, labels, strict=True))


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Role and content of a row, with the tool calls of a turn; None when it is in none of the chat forms."""
    listed = next(
        (row[key] for key in ("messages", "conversations", "conversation") if isinstance(row.get(key), list)), None
    )
    if listed is not None:
        return _turns(listed)
    prompt = row.get("prompt", row.get("instruction"))
    keys = [key for key in ("reply", "response", "output", "completion") if key in row]
    if not isinstance(prompt, (str, list)):
        return None
    reply = row[keys[0]] if keys else []
    return [*_side(prompt, "user"), *_side("" if reply is None else reply, "assistant")]


def _side(value: Any, role: str) -> list[dict[str, Any]]:
    """Prompt or reply: one text of this role, or the turns of a conversation."""
    return _turns(value) if isinstance(value, list) else [{"role": role, "content": str(value)}]


def _turns(listed: list[Any]) -> list[dict[str, Any]]:
    """The turns of a conversation in either spelling."""
    found: list[dict[str, Any]] = []
    for item in listed:
        turn = mapping(item)
        role = str(turn.get("role", turn.get("from", "")))
        calls = turn.get("tool_calls")
        if not calls and isinstance(turn.get("function_call"), dict):
            calls = [{"type": "function", "function": turn["function_call"]}]
        content = _content(turn.get("content", turn.get("value")))
        found.append({"role": _ROLES.get(role, role), "content": content, **({"tool_calls": calls} if calls else {})})
    return found


def _content(value: Any) -> str:
    """The text of a turn, which may be a list of parts such as {type: text, text: ...}."""
    parts = [part if isinstance(part, str) else mapping(part).get("text") for part in items(value)]
    return value if isinstance(value, str) else "".join(part for part in parts if isinstance(part, str))


def _says(turn: Mapping[str, Any]) -> bool:
    """Whether the turn has text or calls a tool."""
    return bool(turn["content"].strip() or turn.get("tool_calls"))


_OF_TEXT = ("no_reply", "empty_reply", "thinking_not_closed", "thinking_only", "plain_text")


def _of_text(text: str) -> set[str]:
    """What is wrong with a rendered conversation, of `_OF_TEXT`. Without a template's tokens it is plain text."""
    family = fitting(text) or likely(text)
    if family is None:
        return {"no_reply"} if turn_openers(text) else {"plain_text"}
    found = replies(text, family.header, family)
    said = [text[reply.start : reply.stop] for reply in found]
    kinds = {
        "empty_reply": not any(reply.strip() for reply in said),
        "thinking_not_closed": any(still_thinks(reply) for reply in said),
        "thinking_only": any(only_thinks(reply) for reply in said),
    }
    return {kind for kind, is_so in kinds.items() if is_so}


def _without_delimiters(facts: Facts) -> None:
    """Rows of plain text have no reply for a trainer that looks for the header of this known template."""
    corpus = facts.mapping("corpus")
    plain = items(corpus.get("plain_text"))
    if plain:
        count = corpus["no_reply_count"] + corpus["plain_text_count"]
        listed = sorted([*corpus["no_reply"], *plain])[:50]
        facts.values["corpus"] = {**corpus, "no_reply_count": count, "no_reply": listed}


def summary(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over rows, with the numbers (from 0) of those that are wrong."""
    no_reply: list[int] = []
    empty: list[int] = []
    unclosed: list[int] = []
    unknown: list[int] = []
    uneven: list[int] = []
    thinks: list[int] = []
    plain: list[int] = []
    wrong: list[int] = []
    apart: list[int] = []
    glued: list[int] = []
    templates: dict[str, int] = {}
    for index, row in enumerate(rows):
        ids, marks = _ids(row, "input_ids"), _marks(row)
        if ids is not None and marks is not None and len(ids) != len(marks):
            uneven.append(index)
        wrong += [index] if _no_numbers(row) else []
        apart += [index] if _contradicts(row) else []
        turns = messages_of(row)
        text = row.get("text")
        if turns is None and isinstance(text, str):
            for name in hits(text[:LOOKED_AT]):
                templates[name] = templates.get(name, 0) + 1
            told = _of_text(text)
            for kind, listing in zip(_OF_TEXT, (no_reply, empty, unclosed, thinks, plain), strict=True):
                listing += [index] if kind in told else []
            continue
        if turns is None:
            if not isinstance(row.get("input_ids"), list):
                unknown.append(index)
            continue
        said = [turn for turn in turns if turn["role"] == "assistant"]
        if not said:
            no_reply.append(index)
        elif not any(_says(reply) for reply in said):
            empty.append(index)
        if any(has_delimiters(reply["content"]) for reply in said):
            glued.append(index)
        if any(still_thinks(reply["content"]) for reply in said):
            unclosed.append(index)
        elif any(only_thinks(reply["content"]) and not reply.get("tool_calls") for reply in said):
            thinks.append(index)
    listed = {"no_reply": no_reply, "empty_reply": empty, "thinking_not_closed": unclosed, "unknown_form": unknown}
    listed |= {"mask_length": uneven, "thinking_only": thinks, "plain_text": plain, "no_ids": wrong}
    listed |= {"mask_and_labels": apart, "delimiters_in_reply": glued}
    counts = {f"{name}_count": len(items) for name, items in listed.items()}
    return {"samples": len(rows), **counts, **{k: v[:50] for k, v in listed.items()}, "templates": templates}


def read_tokenizer(value: str, facts: Facts) -> None:
    """Add `tokenizer`, the family of its chat template, and what rendering the corpus supervises."""
    folder = existing(value, "--tokenizer")
    template = _template_text(folder, facts)
    families = hits(_unescaped(template)) if template else {}
    family = commonest(families)
    about = {"folder": str(folder), "fast": (folder / "tokenizer.json").is_file(), "template": family}
    facts.values["corpus"] = {**facts.mapping("corpus"), "tokenizer": about, "has_template": template is not None}
    if family is not None:
        _without_delimiters(facts)
    path = facts.mapping("corpus").get("path")
    if not isinstance(path, str):
        facts.could_not("what the tokenizer makes of a corpus", "--corpus was not given")
        return
    if importlib.util.find_spec("transformers") is None:
        facts.could_not("the loss mask by rendering", "transformers is not installed", fix="pip install transformers")
        return
    _render(folder, Path(path), facts)


def _template_text(folder: Path, facts: Facts) -> str | None:
    try:
        if (folder / "chat_template.jinja").is_file():
            return read_text(folder / "chat_template.jinja")
        if (folder / "tokenizer_config.json").is_file():
            text = mapping(read_json(folder / "tokenizer_config.json").value).get("chat_template")
            return text if isinstance(text, str) else None
    except ReadError as error:
        facts.broken(str(folder), error.what)
    return None


def _unescaped(template: str) -> str:
    """A Jinja template as rough text: quotes and pluses between literals dropped, so that delimiters stand together."""
    for piece in ("{{", "}}", "'", '"', " + ", "{%", "%}", "-"):
        template = template.replace(piece, "")
    return template.replace("\\n", "\n").replace("message[role]", "assistant").replace("message.role", "assistant")


def _render(folder: Path, path: Path, facts: Facts) -> None:
    """Supervised tokens of each row, by render boundaries: tokens of a turn minus tokens up to its header."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign files fail in many ways, and each is the same answer for the user
        facts.could_not(
            "the loss mask by rendering", f"the tokenizer does not load ({' '.join(str(error).split())[:160]})"
        )
        return
    rows = [value for value in _values(path)[0] if isinstance(value, dict)]
    _beyond_vocabulary(rows, len(tokenizer), facts)
    counts: list[int] = []
    failed: list[int] = []
    for index, row in enumerate(rows[:RENDERED]):
        turns = messages_of(row)
        if turns is None:
            continue
        try:
            counts.append(_supervised(tokenizer, turns))
        except Exception:  # a template is code from outside: any error means that it cannot render this row
            failed.append(index)
    if failed:
        facts.values["corpus"] = {**facts.mapping("corpus"), "render_failed": failed[:50], "render_tried": len(counts)}
    if counts and not facts.has("samples_supervised_tokens"):
        facts.put("samples_supervised_tokens", counts, f"{path} rendered with {folder}")
    if len(rows) > RENDERED:
        facts.could_not(f"the mask of {len(rows) - RENDERED} rows", f"{RENDERED} rows are rendered")


def _beyond_vocabulary(rows: Sequence[Mapping[str, Any]], size: int, facts: Facts) -> None:
    """Remember the first ready id that the tokenizer cannot have given."""
    for index, row in enumerate(rows):
        largest = max((one for one in _ids(row, "input_ids") or [] if type(one) is int), default=0)
        if largest >= size:
            told = {"row": index, "id": largest, "size": size}
            facts.values["corpus"] = {**facts.mapping("corpus"), "beyond_vocabulary": told}
            return


def _supervised(tokenizer: Any, turns: list[dict[str, Any]]) -> int:
    total = 0
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant" and _says(turn):
            before = tokenizer.apply_chat_template(turns[:place], add_generation_prompt=True, tokenize=False)
            after = tokenizer.apply_chat_template(turns[: place + 1], tokenize=False)
            reply = (
                after[len(before) :] if after.startswith(before) else turn["content"] or json.dumps(turn["tool_calls"])
            )
            total += len(tokenizer(reply, add_special_tokens=False)["input_ids"])
    return total
