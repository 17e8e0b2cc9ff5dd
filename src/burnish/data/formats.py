"""The shapes of rows in files, and the checks of their values."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from burnish.errors import UserError, closest, did_you_mean
from burnish.types import (
    Conversation,
    Labelled,
    Message,
    Messages,
    Preference,
    Prompt,
    Ranking,
    Row,
    Scored,
    Steps,
    Text,
    ToolCall,
)

ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
}
REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing, by the names that transformers knows
# What messages may have besides role and content.
OF_ROLE = {"assistant": ("tool_calls", *REASONING), "tool": ("tool_call_id", "name")}
# Columns that training ignores without data.keep. Files that Burnish writes have those in the second line.
PROVENANCE = frozenset(
    {"id", "source", "meta", "seed", "finish_reason", "round", "rewards", "verdicts", "P"}
    | {"finish_reason", "logprob", "logprob_mean", "step", "kind", "score"}
)
DUPLICATE = "duplicate key"
DEEPEST = 64  # lists and objects inside each other
LARGEST = (2 - 2**-23) * 2.0**127  # the largest float32; rewards, margins and scores are float32
PLAIN_NAME = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_][\w.-]*", re.ASCII | re.IGNORECASE)
EXACT = 1e-6  # a Q this close to 1 or -1 counts as 1 or -1
# What UltraFeedback says of a completion besides its text and score.
ULTRAFEEDBACK = ("model", "principle", "annotations", "critique", "fine-grained_score")
MESSAGE_TEXT = re.compile(r"\s*(\[\s*)?\{\s*[\"'](role|from)[\"']\s*:")
TURN = re.compile(r"\n\n(Human|Assistant):(?= |\n|$)")

Record = Mapping[str, Any]


class Decoder(json.JSONDecoder):
    """A JSON decoder that notices duplicate keys, of which ``json`` silently keeps the last.

    ``duplicates`` lists the duplicate keys of the last decoded text.
    """

    def __init__(self) -> None:
        self.duplicates: list[str] = []
        super().__init__(object_pairs_hook=self._object)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            self.duplicates += [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        return record

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """The value that begins at ``idx``, and the position after it.

        Raises:
            BeyondLimits: the value is nested too deeply for the parser, or has a number with too many digits.
            JSONDecodeError: the text is not JSON.
        """
        self.duplicates = []
        try:
            return super().raw_decode(s, idx)
        except json.JSONDecodeError:
            raise
        except RecursionError:
            raise BeyondLimits("a value that is nested too deeply", s, idx) from None
        except ValueError:
            digits = sys.get_int_max_str_digits()
            raise BeyondLimits(f"a number of more than {digits:,} digits", s, idx) from None


class BeyondLimits(json.JSONDecodeError):
    """JSON that the parser refuses although its syntax may be right."""


BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def end_of_value(text: str, start: int) -> int:
    """The position after the JSON list, object or number at ``start``, which is not parsed."""
    if text[start] not in "[{":
        return next((i for i in range(start, len(text)) if text[i] in ",] \t\r\n"), len(text))
    depth = 0
    for match in BRACKETS.finditer(text, start):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth == 0:
            return match.end()
    return len(text)


class BadRow(UserError):
    """A row is wrong: ``BadRow("chat.jsonl:17", "messages[0]", "unknown role", "got 'usr' (did you mean 'user'?)")``.

    Skipped rows are counted by ``reason``.
    """

    def __init__(self, source: str, key: str, reason: str, detail: str = "") -> None:
        self.source, self.key, self.reason, self.detail = source, key, reason, detail
        super().__init__(": ".join(part for part in (source, key, reason, detail) if part))


class At(NamedTuple):
    """The place of a value: ``At("chat.jsonl:17", "messages[0].content")``; the key of a whole row is empty.

    ``keep`` holds the keys to ignore in the row and in its messages and steps. ``names`` are the file's names for role
    and content in messages, if ``keys`` names them: ``("speaker", "text")``.
    """

    source: str
    key: str = ""
    keep: frozenset[str] = frozenset()
    names: tuple[str, str] | None = None

    def inside(self, key: str | int) -> At:
        """The place of an item or key inside the value."""
        name = f"[{key}]" if isinstance(key, int) else f".{key}" if self.key else key
        return At(self.source, self.key + name, self.keep, self.names)

    def bad(self, reason: str, detail: str = "") -> BadRow:
        """The error that names this place."""
        return BadRow(self.source, self.key, reason, detail)


# --- values -------------------------------------------------------------------------------------------------------


def check_record(record: Any, source: str) -> Any:
    """The record, or a ``BadRow`` if ``check_values`` refuses one of its columns."""
    try:
        for name, value in record.items() if isinstance(record, Mapping) else [("", record)]:
            check_values(name, At(source, str(name)))
            check_values(value, At(source, str(name)))
    except BadRow as bad:
        return bad
    return record


def check_values(value: Any, at: At, depth: int = DEEPEST) -> None:
    r"""Raise a BadRow if lists and objects are nested too deeply, or a text cannot be encoded as UTF-8.

    JSON can spell such text: ``"\ud800"`` is half of a surrogate pair.
    """
    if isinstance(value, str):
        if not value.isascii():
            _check_unicode(value, at)
    elif isinstance(value, dict | list | tuple):
        if depth == 0:
            raise at.bad("nested too deeply", f"more than {DEEPEST} lists and objects inside each other")
        if isinstance(value, dict):
            for key in value:
                check_values(key, at, 0)
            value = value.values()
        for item in value:
            check_values(item, at, depth - 1)


def _check_unicode(text: str, at: At) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start + 1} is {text[error.start]!r}, half of a surrogate pair"
        raise at.bad("not Unicode", half) from None


def _text(value: Any, at: At) -> str:
    if not isinstance(value, str):
        raise at.bad("not text", f"expected a string, got {shown(value)}")
    if not value.strip():
        raise at.bad("empty text")
    return value


def _number(value: Any, at: At) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        raise at.bad("not a number", f"got {shown(value)}") from None
    except OverflowError:  # an integer of more than 308 digits
        number = LARGEST * 2
    if not math.isfinite(number):
        raise at.bad("not a finite number", f"got {shown(value)}")
    if abs(number) > LARGEST:
        raise at.bad("too large for float32", f"expected at most {LARGEST:.4g} in size, got {shown(value)}")
    return number


def column_number(record: Record, name: str, source: str) -> float:
    """The number in a column that a shape does not read.

    Raises:
        BadRow: there is no such column, or it is not a finite number.
    """
    if name not in record:
        raise BadRow(source, name, "no score to select by", missing(record, (name,)))
    return _number(record[name], At(source, name))


def list_at(value: Any, at: At) -> list[Any]:
    """A list, or its JSON text as in csv files."""
    value = _decoded(value, at, "not a list")
    if not isinstance(value, list | tuple):
        raise at.bad("not a list", f"got {shown(value)}")
    return list(value)


def _object(value: Any, at: At) -> dict[str, Any]:
    """An object with keys, or its JSON text."""
    value = _decoded(value, at, "not an object")
    if not isinstance(value, Mapping):
        raise at.bad("not an object", f"expected keys and values, got {shown(value)}")
    return {str(key): item for key, item in value.items()}


def _decoded(value: Any, at: At, reason: str) -> Any:
    """The value, decoded if it is JSON text."""
    if not isinstance(value, str):
        return value
    decoder = Decoder()
    try:
        decoded = decoder.decode(value)
    except ValueError:
        raise at.bad(reason, f"got text that is not JSON, {shown(value)}") from None
    if decoder.duplicates:
        raise at.bad(DUPLICATE, repr(decoder.duplicates[0]))
    check_values(decoded, at)
    return decoded


def _message(value: Any, at: At) -> Message:
    """``{"role", "content"}`` or ShareGPT's ``{"from", "value"}``."""
    if not isinstance(value, Mapping):
        raise at.bad("not a message", f"expected {{role, content}}, got {shown(value)}")
    names = at.names or (("from", "value") if "from" in value and "role" not in value else ("role", "content"))
    calls = not empty(value.get("tool_calls")) and "tool_calls" not in at.keep
    for name in names:
        if name not in value and not (calls and name == names[1]):
            raise at.bad("missing key", missing(value, (name,)))
    role, content = value[names[0]], value.get(names[1])
    if not isinstance(role, str) or role not in ROLES:
        hint = did_you_mean(str(role), ROLES) or f"; expected one of {', '.join(ROLES)}"
        raise at.bad("unknown role", f"got {shown(role)}{hint}")
    role, here = ROLES[role], at.inside(names[1])
    of_role = OF_ROLE.get(role, ())
    _no_other_keys(value, (*names, *of_role), at, f"write it into {names[1]!r}, ")
    blank = empty(content) or (isinstance(content, str) and not content.strip())
    if blank and ((calls and role == "assistant") or (role == "tool" and isinstance(content, str))):
        message: Message = {"role": role, "content": content or ""}
    else:
        message = {"role": role, "content": _text(content, here)}
    if len(value) > len(names):
        _add_keys(message, {k: v for k in of_role if k not in at.keep and not empty(v := value.get(k))}, at)
    return message


def _add_keys(message: Message, given: Mapping[str, Any], at: At) -> None:
    """Add what a message of the assistant or of a tool has besides its content."""
    reasoning = [key for key in REASONING if key in given]
    if reasoning:
        message["reasoning_content"] = _text(given[reasoning[0]], at.inside(reasoning[0]))
        if any(given[key] != given[reasoning[0]] for key in reasoning):
            raise at.inside(reasoning[1]).bad("two reasonings", f"{reasoning[0]!r} differs from it: keep one")
    if "tool_calls" in given:
        here = at.inside("tool_calls")
        message["tool_calls"] = [
            _tool_call(call, here.inside(i)) for i, call in enumerate(list_at(given["tool_calls"], here))
        ]
    if "tool_call_id" in given:
        message["tool_call_id"] = _text(given["tool_call_id"], at.inside("tool_call_id"))
    if "name" in given:
        message["name"] = _text(given["name"], at.inside("name"))


def _tool_call(value: Any, at: At) -> ToolCall:
    """``{"type": "function", "function": {"name", "arguments"}}``, or the function alone."""
    call = _object(value, at)
    wrapped = "function" in call
    if wrapped:
        _no_other_keys(call, ("type", "function", "id"), at)
        if call.get("type", "function") not in ("function", None):
            raise at.inside("type").bad("not a function call", f"expected 'function', got {shown(call['type'])}")
    inner = at.inside("function") if wrapped else at
    function = _object(call["function"], inner) if wrapped else call
    _no_other_keys(function, ("name", "arguments") if wrapped else ("name", "arguments", "type", "id"), inner)
    for key in ("name", "arguments"):
        if key not in function:
            raise inner.bad("missing key", missing(function, (key,)))
    name = _text(function["name"], inner.inside("name"))
    arguments = {} if function["arguments"] in (None, "") else _object(function["arguments"], inner.inside("arguments"))
    result: ToolCall = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        result["id"] = _text(call["id"], at.inside("id"))
    return result


def _no_other_keys(value: Mapping[str, Any], names: tuple[str, ...], at: At, advice: str = "") -> None:
    """Raise a BadRow for a key of a message or step that nothing reads, unless it is empty or a weight of 1."""
    known = {*names, *PROVENANCE, *at.keep}
    unread = [str(k) for k, v in value.items() if k not in known and not empty(v) and not (k == "weight" and v == 1)]
    if unread:
        detail = f"{unread[0]!r} would be lost: {advice}remove it, or ignore it with data.keep: {flow_list(unread)}"
        raise at.inside(unread[0]).bad("key that is not read", detail)


def flow_list(names: Iterable[str]) -> str:
    """Names as a YAML list in one line: ``[id, "a, b"]``."""
    return f"[{', '.join(map(_yaml, names))}]"


def flow_map(names: Mapping[str, str]) -> str:
    """Names as a YAML mapping in one line: ``{prompt: question}``."""
    return "{" + ", ".join(f"{_yaml(key)}: {_yaml(value)}" for key, value in names.items()) + "}"


def _yaml(name: str) -> str:
    return name if PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def empty(value: Any) -> bool:
    """Whether a value is null, empty, or the JSON text of an empty list or object.

    Files with fixed columns have every key in every row, so an empty value stands for a missing key.
    """
    return value is None or (isinstance(value, str | list | tuple | dict) and (not value or value in ("[]", "{}")))


def _messages(value: Any, at: At) -> Messages:
    items = list_at(value, at)
    if not items:
        raise at.bad("empty conversation")
    messages = tuple(_message(item, at.inside(i)) for i, item in enumerate(items))
    _check_ids(messages, at)
    return messages


def _check_ids(messages: Messages, at: At) -> None:
    """Raise a BadRow if two calls of a message have one id, or a result is that of no call before it.

    Calls may have no ids, and the calls of the first results may be in another column.
    """
    called: dict[str, str] = {}
    for i, message in enumerate(messages):
        own = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ()) if "id" in call]
        for k, (id, _) in enumerate(own):
            if id in dict(own[:k]):
                raise at.inside(i).inside("tool_calls").bad("two calls have this id", repr(id))
        called.update(own)
        id = message.get("tool_call_id")
        if id is None or not called:
            continue
        here = at.inside(i)
        if id not in called:
            raise here.inside("tool_call_id").bad("no call before it has this id", repr(id))
        if (name := message.get("name", called[id])) != called[id]:
            raise here.inside("name").bad("not the tool of this call", f"got {name!r}, expected {called[id]!r}")


def _turns(value: Any, at: At, role: str) -> Messages:
    """The messages in ``value``: a list, a single message, or a text by ``role``."""
    if not isinstance(value, str):
        return (_message(value, at),) if isinstance(value, Mapping) else _messages(value, at)
    if MESSAGE_TEXT.match(value):
        raise at.bad("messages as text", f"write them as JSON, not as a string with JSON, got {shown(value)}")
    return ({"role": role, "content": _text(value, at)},)


def _with_system(record: Record, row: At, messages: Messages, key: str = "system") -> Messages:
    """The messages, after the record's system prompt if it has one."""
    system = record.get(key)
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    first: Message = {"role": "system", "content": _text(system, row.inside(key))}
    if messages[0]["role"] != "system":
        return (first, *messages)
    if messages[0] != first:
        raise row.inside(key).bad("two system prompts", "the messages begin with a different one")
    return messages


def shown(value: Any) -> str:
    """A value with its type, shortened for a message."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a list that contains itself
        text = "..."
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def missing(record: Record, names: tuple[str, ...]) -> str:
    """The keys of a record, and the missing ones that may be misspelled: "has keys 'promt': did you mean 'prompt'?"."""
    near = [name for name in names if closest(name, map(str, record))]
    hint = f": did you mean {' and '.join(map(repr, near))}?" if near else ""
    return f"has keys {', '.join(map(repr, record)) or 'none'}{hint}"


# --- shapes -------------------------------------------------------------------------------------------------------


def _read_text(record: Record, row: At) -> Text:
    return Text(_text(record["text"], row.inside("text")), row.source)


def _learnable(messages: Messages, start: int | None, at: At) -> Conversation:
    if all(message["role"] != "assistant" for message in messages[start or 0 :]):
        raise at.bad("no assistant turn", "there is nothing to learn")
    if messages[-1]["role"] != "assistant":
        raise at.bad("last message is not by the assistant", f"it is by {messages[-1]['role']!r}")
    return Conversation(messages, start, at.source)


def _read_messages(record: Record, row: At, key: str = "messages") -> Conversation:
    at = row.inside(key)
    return _learnable(_with_system(record, row, _messages(record[key], at)), None, at)


def _read_whole_prompt(record: Record, row: At) -> Conversation:
    """A row as in OpenRLHF without an output key: ``prompt`` holds the whole conversation."""
    if isinstance(record["prompt"], str):
        raise row.inside("completion").bad("missing key", missing(record, ("completion",)))
    return _read_messages(record, row, "prompt")


def _completed(record: Record, row: At, prompt: Messages, key: str, system: str = "system") -> Conversation:
    prompt = _with_system(record, row, prompt, system)
    return _learnable(prompt + _turns(record[key], row.inside(key), "assistant"), len(prompt), row.inside(key))


def _read_prompt_completion(record: Record, row: At) -> Conversation:
    return _completed(record, row, _turns(record["prompt"], row.inside("prompt"), "user"), "completion")


def _alpaca_prompt(record: Record, row: At) -> Messages:
    """The turns of ``history``, and a turn of the user with ``instruction`` and ``input``."""
    question = _text(record["instruction"], row.inside("instruction"))
    extra = record.get("input")
    if extra is not None and not (isinstance(extra, str) and not extra.strip()):
        question = f"{question}\n\n{_text(extra, row.inside('input'))}"
    turns: list[Message] = []
    at = row.inside("history")
    for i, pair in enumerate([] if empty(record.get("history")) else list_at(record["history"], at)):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise at.inside(i).bad("not a question and an answer", f"expected a list of two texts, got {shown(pair)}")
        texts = [_text(text, at.inside(i).inside(j)) for j, text in enumerate(pair)]
        turns.append({"role": "user", "content": texts[0]})
        turns.append({"role": "assistant", "content": texts[1]})
    return (*turns, {"role": "user", "content": question})


def _read_alpaca(record: Record, row: At) -> Conversation:
    """As in LLaMA-Factory, the answers of ``history`` are part of the completion."""
    prompt = _alpaca_prompt(record, row)
    conversation = _completed(record, row, prompt, "output")
    first = next(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
    return replace(conversation, completion_start=first)


def _read_openorca(record: Record, row: At) -> Conversation:
    question = _turns(_text(record["question"], row.inside("question")), row.inside("question"), "user")
    return _completed(record, row, question, "response", "system_prompt")


def _transcript(value: str, at: At) -> Messages:
    """The turns of an Anthropic HH string; each begins with ``Human:`` or ``Assistant:`` after a blank line."""
    pieces = TURN.split(value)
    if len(pieces) < 3 or pieces[0].strip():
        detail = (
            "expected a message list or '\\n\\nHuman: ...' text; write a text that both answers follow into 'prompt'"
        )
        raise at.bad("not a transcript", detail)
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        {"role": roles[name], "content": _text(content, at.inside(i)).strip()}
        for i, (name, content) in enumerate(zip(pieces[1::2], pieces[2::2], strict=True))
    )


def _answer(value: Any, at: At, prompt: Messages) -> Messages:
    """The messages after the prompt. A message list may repeat the prompt, also after a system message."""
    messages = _turns(value, at, "assistant")
    if messages[0]["role"] == "assistant":
        return messages
    for start in range(len(messages)):
        if messages[start : start + len(prompt)] == prompt and len(messages) > start + len(prompt):
            break
    else:
        raise at.bad("does not follow the prompt", f"it begins with a turn by {messages[0]['role']!r}")
    if any(message["role"] != "system" for message in messages[:start]):
        raise at.bad("does not follow the prompt", "it has turns before the prompt that are not in 'prompt'")
    return messages[start + len(prompt) :]


def _compared(record: Record, row: At, prompt: Messages, chosen: Messages, rejected: Messages) -> Preference:
    prompt = _with_system(record, row, prompt)
    if chosen == rejected:
        raise row.inside("rejected").bad("equal to chosen", "there is nothing to prefer")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        _ends_with_assistant(answer, row.inside(key))
    margin = None if record.get("margin") is None else _number(record["margin"], row.inside("margin"))
    if margin is not None and margin < 0:
        raise row.inside("margin").bad("margin below 0", f"got {margin}: swap chosen and rejected")
    share = None if record.get("p_chosen") is None else _number(record["p_chosen"], row.inside("p_chosen"))
    if share is not None and not 0 <= share <= 1:
        raise row.inside("p_chosen").bad("probability outside [0, 1]", f"got {share}")
    return Preference(prompt, chosen, rejected, margin, share, row.source)


def _ends_with_assistant(messages: Messages, at: At) -> None:
    if messages[-1]["role"] != "assistant":
        raise at.bad("last message is not by the assistant", f"it is by {messages[-1]['role']!r}")


def _read_preference(record: Record, row: At) -> Preference:
    prompt = _turns(record["prompt"], row.inside("prompt"), "user")
    answers = (_answer(record[key], row.inside(key), prompt) for key in ("chosen", "rejected"))
    return _compared(record, row, prompt, *answers)


def _read_continued(record: Record, row: At, key: str) -> Preference:
    """A conversation and two messages that could follow it."""
    prompt = _messages(record[key], row.inside(key))
    return _compared(record, row, prompt, *(_answer(record[k], row.inside(k), prompt) for k in ("chosen", "rejected")))


def _read_alpaca_preference(record: Record, row: At) -> Preference:
    answers = (_turns(record[key], row.inside(key), "assistant") for key in ("chosen", "rejected"))
    return _compared(record, row, _alpaca_prompt(record, row), *answers)


def _read_pair(record: Record, row: At) -> Preference:
    """Two conversations, as message lists or HH transcripts; their common beginning is the prompt."""
    chosen, rejected = (
        _transcript(record[key], row.inside(key))
        if isinstance(record[key], str)
        else _messages(record[key], row.inside(key))
        for key in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise row.inside("rejected").bad("equal to chosen", "there is nothing to prefer")
    same = next(i for i, (a, b) in enumerate(itertools.zip_longest(chosen, rejected)) if a != b)
    for key, answer in (("chosen", chosen[same:]), ("rejected", rejected[same:])):
        if not answer:
            raise row.inside(key).bad("no answer after the common prompt", "the other conversation continues it")
        if answer[0]["role"] != "assistant":
            raise row.inside(key).bad(
                "differs before an answer", f"chosen and rejected first differ in a user turn, {same}"
            )
    if same == 0:
        raise row.inside("chosen").bad("no common prompt", "the first messages of chosen and rejected differ")
    return _compared(record, row, chosen[:same], chosen[same:], rejected[same:])


def _read_ranking(record: Record, row: At, key: str, sign: float) -> Ranking:
    """Completions with scores, or with ranks. The lowest rank is the best, so ``sign`` is -1 for ranks."""
    prompt = _turns(record["prompt"], row.inside("prompt"), "user")
    at = row.inside("completions")
    answers = tuple(_answer(value, at.inside(i), prompt) for i, value in enumerate(list_at(record["completions"], at)))
    for i, answer in enumerate(answers):
        _ends_with_assistant(answer, at.inside(i))
        if answer in answers[:i]:
            raise at.inside(i).bad("equal to another completion", "there is nothing to prefer")
    numbers = list_at(record[key], row.inside(key))
    scores = tuple(sign * _number(value, row.inside(key).inside(i)) for i, value in enumerate(numbers))
    if len(answers) < 2 or len(answers) != len(scores):
        detail = f"got {len(answers)} completions and {len(scores)} {key}: expected equally many, at least two"
        raise row.inside(key).bad("not one for each completion", detail)
    return Ranking(_with_system(record, row, prompt), answers, scores, row.source)


def _read_ultrafeedback(record: Record, row: At) -> Ranking:
    """Completions with the overall score of each."""
    prompt = _turns(record["instruction"], row.inside("instruction"), "user")
    at = row.inside("completions")
    items = list_at(record["completions"], at)
    for i, item in enumerate(items):
        for key in ("response", "overall_score"):
            if not isinstance(item, Mapping) or key not in item:
                detail = f"expected response and overall_score, got {shown(item)}"
                raise at.inside(i).inside(key).bad("missing key", detail)
        _no_other_keys(item, ("response", "overall_score", *ULTRAFEEDBACK), at.inside(i))
    answers = [_text(item["response"], at.inside(i).inside("response")) for i, item in enumerate(items)]
    scores = [item["overall_score"] for item in items]
    return _read_ranking({**record, "prompt": prompt, "completions": answers, "scores": scores}, row, "scores", 1.0)


def _read_prompt(record: Record, row: At, key: str = "prompt") -> Prompt:
    messages = _with_system(record, row, _turns(record[key], row.inside(key), "user"))
    if messages[-1]["role"] == "assistant":
        raise row.inside(key).bad("prompt ends with the assistant", "there is nothing to answer")
    return Prompt(messages, {name: value for name, value in record.items() if name not in (key, "system")}, row.source)


def _read_alpaca_question(record: Record, row: At) -> Prompt:
    messages = _with_system(record, row, _alpaca_prompt(record, row))
    columns = {name: value for name, value in record.items() if name not in ("instruction", *_ALPACA)}
    return Prompt(messages, columns, row.source)


def _read_labelled(record: Record, row: At) -> Labelled:
    prompt = _turns(record["prompt"], row.inside("prompt"), "user")
    return _judged(record, row, prompt, _answer(record["completion"], row.inside("completion"), prompt))


def _read_labelled_messages(record: Record, row: At, key: str) -> Labelled:
    """A conversation whose last turn, by the assistant, has a label."""
    messages = _messages(record[key], row.inside(key))
    if len(messages) < 2:
        raise row.inside(key).bad("no prompt", "expected a turn before the answer")
    return _judged(record, row, messages[:-1], messages[-1:])


def _read_labelled_alpaca(record: Record, row: At) -> Labelled:
    completion = _turns(record["output"], row.inside("output"), "assistant")
    return _judged(record, row, _alpaca_prompt(record, row), completion)


def _judged(record: Record, row: At, prompt: Messages, completion: Messages) -> Labelled:
    _ends_with_assistant(completion, row)
    value = record["label"]
    words = {"true": True, "false": False, "1": True, "0": False, 1: True, 0: False}
    label = words.get(value.lower() if isinstance(value, str) else value) if isinstance(value, int | str) else None
    if label is None:
        raise row.inside("label").bad("not true or false", f"got {shown(value)}")
    return Labelled(_with_system(record, row, prompt), completion, label, row.source)


def _read_scored(record: Record, row: At, key: str = "text") -> Scored:
    conversation = _read_messages(record, row, key)
    return Scored(conversation.messages, _number(record["reward"], row.inside("reward")), row.source)


def _read_steps(record: Record, row: At) -> Steps:
    """AlphaMath's rows: reasoning steps with their Q, and the output of their code. The prior P is ignored."""
    question = _with_system(record, row, _turns(record["instruction"], row.inside("instruction"), "user"))
    at = row.inside("output")
    texts, values, outputs = [], [], []
    for i, item in enumerate(list_at(record["output"], at)):
        here = at.inside(i)
        for key in ("step", "Q"):
            if not isinstance(item, Mapping) or key not in item:
                raise here.inside(key).bad("missing key", f"expected step and Q, got {shown(item)}")
        _no_other_keys(item, ("step", "Q", "output"), here)
        texts.append(_text(item["step"], here.inside("step")).strip())
        output = item.get("output")
        outputs.append("" if empty(output) else _text(output, here.inside("output")))
        value = _number(item["Q"], here.inside("Q"))
        if abs(value) > 1 + EXACT:
            raise here.inside("Q").bad("Q outside [-1, 1]", f"got {value:g}")
        values.append(min(1.0, max(-1.0, value)))
    if not texts:
        raise at.bad("no steps")
    if abs(abs(values[-1]) - 1) > EXACT:
        last = at.inside(len(values) - 1).inside("Q")
        raise last.bad("last Q is not 1 or -1", f"it is the outcome of the solution, got {values[-1]:g}")
    values[-1] = math.copysign(1.0, values[-1])
    return Steps(question, tuple(texts), tuple(values), row.source, tuple(outputs) if any(outputs) else ())


class Shape(NamedTuple):
    """A shape of rows: its name in ``format``, its row class, its required and its optional columns.

    A prompt may also have any other column, for rewards to read.
    """

    name: str
    kind: type[Any]
    needs: tuple[str, ...]
    read: Callable[[Record, At], Row]
    may: tuple[str, ...] = ("system", "tools")


_PAIR = ("system", "tools", "margin", "p_chosen")
_ALPACA = ("input", "system", "history", "tools")
SHAPES = (
    Shape("text", Text, ("text",), _read_text, ()),
    Shape("messages", Conversation, ("messages",), _read_messages),
    Shape("sharegpt", Conversation, ("conversations",), functools.partial(_read_messages, key="conversations")),
    Shape("prompt_completion", Conversation, ("prompt", "completion"), _read_prompt_completion),
    Shape("openrlhf", Conversation, ("prompt",), _read_whole_prompt),
    Shape("alpaca", Conversation, ("instruction", "output"), _read_alpaca, _ALPACA),
    Shape("openorca", Conversation, ("question", "response"), _read_openorca, ("system_prompt", "tools")),
    Shape("preference", Preference, ("prompt", "chosen", "rejected"), _read_preference, _PAIR),
    Shape(
        "continued",
        Preference,
        ("messages", "chosen", "rejected"),
        functools.partial(_read_continued, key="messages"),
        _PAIR,
    ),
    Shape(
        "continued_sharegpt",
        Preference,
        ("conversations", "chosen", "rejected"),
        functools.partial(_read_continued, key="conversations"),
        _PAIR,
    ),
    Shape(
        "alpaca_preference",
        Preference,
        ("instruction", "chosen", "rejected"),
        _read_alpaca_preference,
        (*_ALPACA, *_PAIR[2:]),
    ),
    Shape("pair", Preference, ("chosen", "rejected"), _read_pair, _PAIR),
    Shape(
        "ranks", Ranking, ("prompt", "completions", "ranks"), functools.partial(_read_ranking, key="ranks", sign=-1.0)
    ),
    Shape(
        "scores", Ranking, ("prompt", "completions", "scores"), functools.partial(_read_ranking, key="scores", sign=1.0)
    ),
    Shape(
        "ultrafeedback",
        Ranking,
        ("instruction", "completions"),
        _read_ultrafeedback,
        ("system", "tools", "models", "correct_answers", "incorrect_answers"),
    ),
    Shape("prompt", Prompt, ("prompt",), _read_prompt),
    Shape("alpaca_prompt", Prompt, ("instruction",), _read_alpaca_question, _ALPACA),
    Shape("labelled", Labelled, ("prompt", "completion", "label"), _read_labelled),
    Shape(
        "labelled_messages",
        Labelled,
        ("messages", "label"),
        functools.partial(_read_labelled_messages, key="messages"),
    ),
    Shape(
        "labelled_sharegpt",
        Labelled,
        ("conversations", "label"),
        functools.partial(_read_labelled_messages, key="conversations"),
    ),
    Shape("labelled_alpaca", Labelled, ("instruction", "output", "label"), _read_labelled_alpaca, _ALPACA),
    Shape("scored_text", Scored, ("text", "reward"), _read_scored),
    Shape("scored", Scored, ("messages", "reward"), functools.partial(_read_scored, key="messages")),
    Shape("steps", Steps, ("instruction", "output"), _read_steps, ("system",)),
    Shape("query", Prompt, ("query",), functools.partial(_read_prompt, key="query")),
)


def other_columns(record: Record, kind: type[Any]) -> dict[str, Any]:
    """The columns of a record that are not part of the row itself, with those in its ``meta``.

    ``other_columns({"prompt": "1+1", "completion": "2", "lang": "en"}, Conversation)`` is ``{"lang": "en"}``.
    """
    own = {key for shape in SHAPES if shape.kind is kind for key in (*shape.needs, *shape.may)}
    columns = {key: value for key, value in record.items() if key not in own | PROVENANCE}
    meta = record.get("meta")
    if isinstance(meta, Mapping):
        return columns | {**meta}
    return columns if meta is None else columns | {"meta": meta}
