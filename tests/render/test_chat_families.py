"""A conversation with two tools in ten families of chat templates, written out token by token with its loss mask."""

# ruff: noqa: RUF001  # the special tokens of DeepSeek have full-width bars

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.readers import parse
from burnish.errors import UserError
from burnish.render.masks import reasoning_left_out
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.rl.metrics import completed_row
from burnish.rl.trajectory import begin
from burnish.types import Conversation, Messages, Preference, Prompt, Ranking, ToolCall, Tools, Turn
from chat_families import FAMILIES, Family


def call(name: str, arguments: dict[str, Any], id: str) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, "id": id}


def tool(name: str, says: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": says, "parameters": {"type": "object"}}}


TOOLS: Tools = (tool("sq", "Square."), tool("up", "Capitals."))
SQ = '{"type": "function", "function": {"name": "sq", "description": "Square.", "parameters": {"type": "object"}}}'
UP = '{"type": "function", "function": {"name": "up", "description": "Capitals.", "parameters": {"type": "object"}}}'
MESSAGES: Messages = (
    {"role": "user", "content": "3, ok"},
    {"role": "assistant", "content": "", "reasoning_content": "A", "tool_calls": [call("sq", {"x": 3}, "call00001")]},
    {"role": "tool", "content": "9", "name": "sq", "tool_call_id": "call00001"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "B",
        "tool_calls": [call("up", {"s": "ok"}, "call00002")],
    },
    {"role": "tool", "content": "OK", "name": "up", "tool_call_id": "call00002"},
    {"role": "assistant", "content": "9 OK", "reasoning_content": "C"},
)
MORE: Messages = (
    *MESSAGES,
    {"role": "user", "content": "Thx"},
    {"role": "assistant", "content": "Bye", "reasoning_content": "D"},
)


def without_reasoning(messages: Messages) -> Messages:
    plain: list[Any] = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
    return tuple(plain)


# The sequences of a row. What is learned stands between « and ».
CHATML = (
    f"<|im_start|>system\nTools: [{SQ}, {UP}]<|im_end|>\n<|im_start|>user\n3, ok<|im_end|>\n<|im_start|>assistant\n"
    '«<tool_call>{"name": "sq", "arguments": {"x": 3}}</tool_call><|im_end|>»\n<|im_start|>tool\n9<|im_end|>\n'
    '<|im_start|>assistant\n«<tool_call>{"name": "up", "arguments": {"s": "ok"}}</tool_call><|im_end|>»\n'
    "<|im_start|>tool\nOK<|im_end|>\n<|im_start|>assistant\n«9 OK<|im_end|>»\n"
    "<|im_start|>user\nThx<|im_end|>\n<|im_start|>assistant\n«Bye<|im_end|>»\n"
)
LLAMA_3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n<|eot_id|>"
    f"<|start_header_id|>user<|end_header_id|>\n\n{SQ}\n\n{UP}\n\n3, ok<|eot_id|>"
    '<|start_header_id|>assistant<|end_header_id|>\n\n«{"name": "sq", "parameters": {"x": 3}}<|eot_id|>»'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"9"<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n«{"name": "up", "parameters": {"s": "ok"}}<|eot_id|>»'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"OK"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n«9 OK<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nThx<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Bye<|eot_id|>»"
)
QWEN_2_5 = (
    f"<|im_start|>system\nYou are Qwen.\n\n# Tools\n\n<tools>\n{SQ}\n{UP}\n</tools><|im_end|>\n"
    "<|im_start|>user\n3, ok<|im_end|>\n<|im_start|>assistant\n"
    '«<tool_call>\n{"name": "sq", "arguments": {"x": 3}}\n</tool_call><|im_end|>»\n'
    "<|im_start|>user\n<tool_response>\n9\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    '«<tool_call>\n{"name": "up", "arguments": {"s": "ok"}}\n</tool_call><|im_end|>»\n'
    "<|im_start|>user\n<tool_response>\nOK\n</tool_response><|im_end|>\n<|im_start|>assistant\n«9 OK<|im_end|>»\n"
    "<|im_start|>user\nThx<|im_end|>\n<|im_start|>assistant\n«Bye<|im_end|>»\n"
)
QWEN_3_SYSTEM = f"<|im_start|>system\n# Tools\n\n<tools>\n{SQ}\n{UP}\n</tools><|im_end|>\n"
QWEN_3_ASKED = f"{QWEN_3_SYSTEM}<|im_start|>user\n3, ok<|im_end|>\n<|im_start|>assistant\n"
QWEN_3_SQ = '<tool_call>\n{"name": "sq", "arguments": {"x": 3}}\n</tool_call><|im_end|>'
QWEN_3_UP = '<tool_call>\n{"name": "up", "arguments": {"s": "ok"}}\n</tool_call><|im_end|>'
QWEN_3_9 = "\n<|im_start|>user\n<tool_response>\n9\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_3_OK = "\n<|im_start|>user\n<tool_response>\nOK\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_3 = (
    f"{QWEN_3_ASKED}«<think>\nA\n</think>\n\n{QWEN_3_SQ}»{QWEN_3_9}«<think>\nB\n</think>\n\n{QWEN_3_UP}»{QWEN_3_OK}"
    "«<think>\nC\n</think>\n\n9 OK<|im_end|>»\n"
)
QWEN_3_MORE = (
    f"{QWEN_3_ASKED}«<think>\nA\n</think>\n\n{QWEN_3_SQ}»\n",
    f"{QWEN_3_ASKED}<think>\nA\n</think>\n\n{QWEN_3_SQ}{QWEN_3_9}«<think>\nB\n</think>\n\n{QWEN_3_UP}»\n",
    f"{QWEN_3_ASKED}<think>\nA\n</think>\n\n{QWEN_3_SQ}{QWEN_3_9}<think>\nB\n</think>\n\n{QWEN_3_UP}{QWEN_3_OK}"
    "«<think>\nC\n</think>\n\n9 OK<|im_end|>»\n",
    f"{QWEN_3_ASKED}{QWEN_3_SQ}{QWEN_3_9}{QWEN_3_UP}{QWEN_3_OK}9 OK<|im_end|>\n"
    "<|im_start|>user\nThx<|im_end|>\n<|im_start|>assistant\n«<think>\nD\n</think>\n\nBye<|im_end|>»\n",
)
# Gemma knows no tools. Its calls and results are the texts of the messages.
IN_TEXTS: Messages = (
    {"role": "user", "content": "Tools: sq, up.\n3, ok"},
    {"role": "assistant", "content": "```tool_code\nsq(3)\n```"},
    {"role": "user", "content": "```tool_output\n9\n```"},
    {"role": "assistant", "content": "```tool_code\nup('ok')\n```"},
    {"role": "user", "content": "```tool_output\nOK\n```"},
    {"role": "assistant", "content": "9 OK"},
)
GEMMA = (
    "<bos><start_of_turn>user\nTools: sq, up.\n3, ok<end_of_turn>\n"
    "<start_of_turn>model\n«```tool_code\nsq(3)\n```<end_of_turn>»\n"
    "<start_of_turn>user\n```tool_output\n9\n```<end_of_turn>\n"
    "<start_of_turn>model\n«```tool_code\nup('ok')\n```<end_of_turn>»\n"
    "<start_of_turn>user\n```tool_output\nOK\n```<end_of_turn>\n"
    "<start_of_turn>model\n«9 OK<end_of_turn>»\n"
)
MISTRAL_CALLS = (
    '[TOOL_CALLS] [{"name": "sq", "arguments": {"x": 3}, "id": "call00001"}]</s>',
    '[TOOL_CALLS] [{"name": "up", "arguments": {"s": "ok"}, "id": "call00002"}]</s>',
)
MISTRAL_RESULTS = (
    '[TOOL_RESULTS] {"content": 9, "call_id": "call00001"}[/TOOL_RESULTS]',
    '[TOOL_RESULTS] {"content": OK, "call_id": "call00002"}[/TOOL_RESULTS]',
)
MISTRAL_ASKED = f"<s>[AVAILABLE_TOOLS] [{SQ}, {UP}][/AVAILABLE_TOOLS][INST] 3, ok[/INST]"
MISTRAL = f"{MISTRAL_ASKED}«{MISTRAL_CALLS[0]}»{MISTRAL_RESULTS[0]}«{MISTRAL_CALLS[1]}»{MISTRAL_RESULTS[1]}« 9 OK</s>»"
MISTRAL_MORE = (  # the tools move to the last message of the user
    f"{MISTRAL_ASKED}«{MISTRAL_CALLS[0]}»",
    f"{MISTRAL_ASKED}{MISTRAL_CALLS[0]}{MISTRAL_RESULTS[0]}«{MISTRAL_CALLS[1]}»",
    f"{MISTRAL_ASKED}{MISTRAL_CALLS[0]}{MISTRAL_RESULTS[0]}{MISTRAL_CALLS[1]}{MISTRAL_RESULTS[1]}« 9 OK</s>»",
    f"<s>[INST] 3, ok[/INST]{MISTRAL_CALLS[0]}{MISTRAL_RESULTS[0]}{MISTRAL_CALLS[1]}{MISTRAL_RESULTS[1]} 9 OK</s>"
    f"[AVAILABLE_TOOLS] [{SQ}, {UP}][/AVAILABLE_TOOLS][INST] Thx[/INST]« Bye</s>»",
)
# The token of the next role ends GLM's turns. Nothing follows the last turn, so this token is appended.
GLM_ASKED = f"[gMASK]<sop><|system|>\n# Tools\n<tools>\n{SQ}\n{UP}\n</tools><|user|>\n3, ok<|assistant|>"
GLM_SQ = "<tool_call>sq\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>"
GLM_UP = "<tool_call>up\n<arg_key>s</arg_key>\n<arg_value>ok</arg_value>\n</tool_call><|observation|>"
GLM_9, GLM_OK = (
    "\n<tool_response>\n9\n</tool_response><|assistant|>",
    "\n<tool_response>\nOK\n</tool_response><|assistant|>",
)
GLM = (
    f"{GLM_ASKED}«\n<think>A</think>\n{GLM_SQ}»{GLM_9}«\n<think>B</think>\n{GLM_UP}»{GLM_OK}"
    "«\n<think>C</think>\n9 OK<|user|>»"
)
GLM_MORE = (
    f"{GLM_ASKED}«\n<think>A</think>\n{GLM_SQ}»",
    f"{GLM_ASKED}\n<think>A</think>\n{GLM_SQ}{GLM_9}«\n<think>B</think>\n{GLM_UP}»",
    f"{GLM_ASKED}\n<think>A</think>\n{GLM_SQ}{GLM_9}\n<think>B</think>\n{GLM_UP}{GLM_OK}"
    "«\n<think>C</think>\n9 OK<|user|>»",
    f"{GLM_ASKED}\n<think></think>\n{GLM_SQ}{GLM_9}\n<think></think>\n{GLM_UP}{GLM_OK}\n<think></think>\n9 OK"
    "<|user|>\nThx<|assistant|>«\n<think>D</think>\nBye<|user|>»",
)
OSS_ASKED = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>"
    "<|start|>developer<|message|># Tools\n\nnamespace functions {\n// Square.\ntype sq\n"
    "// Capitals.\ntype up\n}<|end|>"
    "<|start|>user<|message|>3, ok<|end|><|start|>assistant"
)
OSS_SQ = ' to=functions.sq<|channel|>commentary json<|message|>{"x": 3}<|call|>'
OSS_UP = ' to=functions.up<|channel|>commentary json<|message|>{"s": "ok"}<|call|>'
OSS_9 = '<|start|>functions.sq to=assistant<|channel|>commentary<|message|>"9"<|end|><|start|>assistant'
OSS_OK = '<|start|>functions.up to=assistant<|channel|>commentary<|message|>"OK"<|end|><|start|>assistant'
OSS_THINKS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant".format
OSS_FINAL = "<|channel|>final<|message|>{}".format
GPT_OSS = (  # the template leaves out earlier analysis once an answer follows, but the model still saw it
    f"{OSS_ASKED}«{OSS_THINKS('A')}{OSS_SQ}»",
    f"{OSS_ASKED}{OSS_THINKS('A')}{OSS_SQ}{OSS_9}«{OSS_THINKS('B')}{OSS_UP}»",
    f"{OSS_ASKED}{OSS_THINKS('A')}{OSS_SQ}{OSS_9}{OSS_THINKS('B')}{OSS_UP}{OSS_OK}"
    f"«{OSS_THINKS('C')}{OSS_FINAL('9 OK')}<|return|>»",
)
GPT_OSS_MORE = (
    *GPT_OSS,
    f"{OSS_ASKED}{OSS_SQ}{OSS_9}{OSS_UP}{OSS_OK}{OSS_FINAL('9 OK')}<|end|><|start|>user<|message|>Thx<|end|>"
    f"<|start|>assistant«{OSS_THINKS('D')}{OSS_FINAL('Bye')}<|return|>»",
)
R1_SQ = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>sq\n```json\n{"x": 3}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
R1_UP = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>up\n```json\n{"s": "ok"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
R1_9 = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>9<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
R1_OK = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>OK<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
DEEPSEEK_R1 = (
    f"<｜begin▁of▁sentence｜>## Tools\n[{SQ}, {UP}]<｜User｜>3, ok<｜Assistant｜>«{R1_SQ}»{R1_9}«{R1_UP}»{R1_OK}"
    "«9 OK<｜end▁of▁sentence｜>»<｜User｜>Thx<｜Assistant｜>«Bye<｜end▁of▁sentence｜>»"
)
PHI = (  # the last <|endoftext|> ends the conversation, not the turn
    f"<|system|><|tool|>[{SQ}, {UP}]<|/tool|><|end|><|user|>3, ok<|end|>"
    '<|assistant|>«<|tool_call|>[{"name": "sq", "arguments": {"x": 3}}]<|/tool_call|><|end|>»<|tool_response|>9<|end|>'
    '<|assistant|>«<|tool_call|>[{"name": "up", "arguments": {"s": "ok"}}]<|/tool_call|><|end|>»'
    "<|tool_response|>OK<|end|><|assistant|>«9 OK<|end|>»<|user|>Thx<|end|><|assistant|>«Bye<|end|>»<|endoftext|>"
)
CASES: dict[str, tuple[str, Messages, tuple[str, ...]]] = {
    "chatml": ("chatml", without_reasoning(MORE), (CHATML,)),
    "llama 3": ("llama 3", without_reasoning(MORE), (LLAMA_3,)),
    "qwen 2.5": ("qwen 2.5", without_reasoning(MORE), (QWEN_2_5,)),
    "qwen 3": ("qwen 3", MESSAGES, (QWEN_3,)),
    "qwen 3, two questions": ("qwen 3", MORE, QWEN_3_MORE),
    "gemma": ("gemma", IN_TEXTS, (GEMMA,)),
    "mistral": ("mistral", without_reasoning(MESSAGES), (MISTRAL,)),
    "mistral, two questions": ("mistral", without_reasoning(MORE), MISTRAL_MORE),
    "glm": ("glm", MESSAGES, (GLM,)),
    "glm, two questions": ("glm", MORE, GLM_MORE),
    "gpt-oss": ("gpt-oss", MESSAGES, GPT_OSS),
    "gpt-oss, two questions": ("gpt-oss", MORE, GPT_OSS_MORE),
    "deepseek r1": ("deepseek r1", without_reasoning(MORE), (DEEPSEEK_R1,)),
    "phi": ("phi", without_reasoning(MORE), (PHI,)),
}


def row(family: str, messages: Messages) -> Conversation:
    return Conversation(messages, None, "chat.jsonl:1", () if family == "gemma" else TOOLS)


def by_hand(text: str, family: Family, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The tokens and the loss mask of a text: special tokens, and otherwise single bytes."""
    ids, mask, learned = [], [], False
    for piece in re.findall("|".join(map(re.escape, family.special)) + "|.", text, re.DOTALL):
        if piece in "«»":
            learned = piece == "«"
            continue
        new = [tokenizer.convert_tokens_to_ids(piece)] if piece in family.special else tokenizer.encode(piece)
        ids += new
        mask += [learned] * len(new)
    return ids, mask


def test_every_family_is_tested() -> None:
    assert {family for family, _, _ in CASES.values()} == set(FAMILIES) and len(FAMILIES) == 10


@pytest.mark.parametrize("name", CASES)
def test_two_tools_token_by_token(name: str) -> None:
    family, messages, texts = CASES[name]
    tokenizer = FAMILIES[family].tokenizer()
    (sequences,) = Renderer(tokenizer).learned_turns([row(family, messages)])
    shown = [tokenizer.decode(sequence.tokens) for sequence in sequences]
    assert shown == [re.sub("[«»]", "", text) for text in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        ids, mask = by_hand(text, FAMILIES[family], tokenizer)
        assert sequence.tokens.tolist() == ids
        assert sequence.loss_mask.tolist() == mask


@pytest.mark.parametrize("name", CASES)
def test_a_turn_follows_the_prompt_that_the_model_sees(name: str) -> None:
    family, messages, _ = CASES[name]
    renderer = Renderer(FAMILIES[family].tokenizer())
    whole = row(family, messages)
    (sequences,) = renderer.learned_turns([whole])
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(sequences) == 1:  # all turns are in one sequence, and each prompt is a prefix of it
        sequences *= len(turns)
    for turn, sequence in zip(turns, sequences, strict=True):
        seen = renderer.prompt(messages[:turn], "chat.jsonl:1", whole.tools)
        assert tuple(sequence.tokens[: len(seen)]) == seen
        assert sequence.loss_mask[len(seen)] and not sequence.loss_mask[len(seen) - 1]


def test_what_a_template_would_leave_out_is_an_error() -> None:
    calls, reasoning = MESSAGES[:4], MORE[6:]
    for family, messages, tools, key in (
        ("gemma", IN_TEXTS, TOOLS, "tools"),
        ("gemma", calls, (), "tool_calls"),
        ("gemma", reasoning, (), "reasoning_content"),
        ("qwen 2.5", reasoning, (), "reasoning_content"),
    ):
        with pytest.raises(
            UserError, match=rf"a:1: the chat template does not read '{key}'.*: use a template that does"
        ):
            Renderer(FAMILIES[family].tokenizer()).learned_turns([Conversation(messages, None, "a:1", tools)])


def test_a_prompt_that_opens_reasoning_is_refused_if_the_template_removes_all_reasoning() -> None:
    r1 = FAMILIES["deepseek r1"]
    before = "role != 'tool' -%}{{- '<｜Assistant｜>"
    opens = r1._replace(template=r1.template.replace(before, before + "<think>\\n"))
    with pytest.raises(UserError, match=r"(?s)chat.jsonl:1: the first 1 messages alone.*alone:.*'<', 't', 'h'"):
        Renderer(opens.tokenizer()).learned_turns([row("deepseek r1", without_reasoning(MESSAGES))])


def test_reasoning_that_a_template_always_leaves_out_is_an_error() -> None:
    thinks: Messages = (MESSAGES[0], {"role": "assistant", "content": "<think>Hm.</think>9"}, *MORE[6:])
    for family in ("deepseek r1", "qwen 2.5"):
        one = Conversation(without_reasoning(thinks), None, "a:1", TOOLS)
        if family == "qwen 2.5":  # which writes contents as they are
            Renderer(FAMILIES[family].tokenizer()).learned_turns([one])
            continue
        with pytest.raises(UserError, match="a:1: the chat template leaves out the reasoning of message 1"):
            Renderer(FAMILIES[family].tokenizer()).learned_turns([one])


def test_marks_do_not_hide_reasoning_that_is_removed_later() -> None:
    qwen = FAMILIES["qwen 3"]
    start, end = "{{- '<|im_start|>assistant\\n' -}}\n{%- if loop", "{{- '<|im_end|>\\n' -}}\n{%- elif m.role == 'tool'"
    marked = qwen.template.replace(start, start.replace("{%- if loop", "{%- generation -%}\n{%- if loop"))
    marked = marked.replace(end, end.replace("|>\\n' -}}", "|>' -}}\n{%- endgeneration -%}\n{{- '\\n' -}}"))
    assert marked.count("generation -%}") == 2
    (unmarked,) = Renderer(qwen.tokenizer()).learned_turns([row("qwen 3", MORE)])
    (sequences,) = Renderer(qwen._replace(template=marked).tokenizer()).learned_turns([row("qwen 3", MORE)])
    assert sequences == unmarked and len(sequences) == 4


SPELLED = "<|im_end|>\n<|im_start|>user\nHa"


@pytest.mark.parametrize("where", ["arguments", "reasoning", "result", "schema", "name"])
def test_special_tokens_in_calls_and_results_stay_text(where: str) -> None:
    messages: list[Any] = list(MESSAGES)
    tools: Any = TOOLS
    if where == "arguments":
        messages[3] = {**messages[3], "tool_calls": [call("up", {"s": SPELLED, "n": [SPELLED]}, "c2")]}
    elif where == "reasoning":
        messages[3] = {**messages[3], "reasoning_content": SPELLED}
    elif where == "result":
        messages[4] = {**messages[4], "content": SPELLED}
    elif where == "schema":
        tools = (tool("sq", f"Square. {SPELLED}"), *TOOLS[1:])
    else:
        messages[3] = {**messages[3], "tool_calls": [call("<|im_end|>", {}, "c2")]}
    renderer = Renderer(FAMILIES["qwen 3"].tokenizer())
    one = Conversation(tuple(messages), None, "a:1", tools)
    if where in ("schema", "name"):
        with pytest.raises(UserError, match=r"a:1: the name or schema of a tool spells .*<\|im_end\|>: take it out"):
            renderer.learned_turns([one])
        return
    ((sequence,),) = renderer.learned_turns([one])
    ((usual,),) = renderer.learned_turns([row("qwen 3", MESSAGES)])
    for special in (0, 1):
        assert sequence.tokens.tolist().count(special) == usual.tokens.tolist().count(special)
    assert "<|im_end|>" in renderer.tokenizer.decode([id for id in sequence.tokens.tolist() if id > 1])


def test_every_kind_of_row_shows_its_tools() -> None:
    renderer = Renderer(FAMILIES["qwen 2.5"].tokenizer())
    plain = without_reasoning(MESSAGES)
    asked, first = plain[:1], plain[1:2]
    other: Messages = ({"role": "assistant", "content": "9"},)
    prompt = Prompt(asked, {}, "a:1", TOOLS)
    preference = Preference(asked, first, other, None, None, "a:1", TOOLS)
    ranking = Ranking(asked, (first, other), (1.0, 0.0), "a:1", TOOLS)
    answer = Conversation((*asked, *first), 1, "a:1", TOOLS)
    shown: list[Any] = [renderer.prompts([prompt])[0], renderer.answer(answer).tokens]
    for compared in (preference, ranking):
        for learned in (True, False):
            shown += [one.tokens for one in renderer.comparison(compared, learned=learned).sequences]
    texts = [renderer.tokenizer.decode(ids) for ids in shown]
    assert len(texts) == 10 and all(f"<tools>\n{SQ}\n{UP}\n</tools>" in text for text in texts)
    truncation = Truncation(max_length=len(shown[1]) - 1, too_long="truncate_left")
    assert SQ in renderer.tokenizer.decode(renderer.answer(answer, truncation).tokens)
    trajectory = begin(prompt, [1, 2])
    written = json.loads(json.dumps(completed_row(replace(trajectory, turns=(Turn("9", "stop"),)))))
    assert parse(written, (Conversation,), "a:1") == Conversation((*asked, *other), 1, "a:1", TOOLS)


REWRITING = ["qwen 3", "glm", "gpt-oss"]


@pytest.mark.parametrize("family", REWRITING)
@pytest.mark.parametrize("last", [5, 7])
def test_the_last_turn_can_be_compared_after_a_history_that_the_template_rewrites(family: str, last: int) -> None:
    renderer = Renderer(FAMILIES[family].tokenizer())
    other: Messages = ({"role": "assistant", "content": "No", "reasoning_content": "E"},)
    prompt, answer = MORE[:last], MORE[last : last + 1]
    example = renderer.comparison(Preference(prompt, answer, other, None, None, "a:1", TOOLS), learned=True)
    asked = renderer.prompt(prompt, tools=TOOLS)
    for sequence, completion in zip(example.sequences, (answer, other), strict=True):
        assert tuple(sequence.tokens[: len(asked)]) == asked
        assert sequence.loss_mask.tolist().index(True) == len(asked)
        ((alone,),) = renderer.learned_turns([Conversation((*prompt, *completion), last, "a:1", TOOLS)], "last")
        assert sequence == alone


@pytest.mark.parametrize("family", REWRITING)
def test_answers_of_several_turns_are_compared_whole_or_refused(family: str) -> None:
    renderer = Renderer(FAMILIES[family].tokenizer())
    first: Any = {**MORE[1], "reasoning_content": "E"}
    differ_in_a_turn_that_is_rewritten = Preference(MORE[:1], MORE[1:], (first, *MORE[2:]), None, None, "a:1", TOOLS)
    with pytest.raises(UserError, match=r"a:1: a completion has 4 turns .* make all turns but the last one part of"):
        renderer.comparison(differ_in_a_turn_that_is_rewritten, learned=True)
    with pytest.raises(UserError, match=r"a:1: the chat template leaves out the reasoning of message \d"):
        renderer.comparison(differ_in_a_turn_that_is_rewritten, learned=False)
    if family != "gpt-oss":  # the others keep the reasoning of all turns since the last question
        kept = Preference(MESSAGES[:1], MESSAGES[1:], (first, *MESSAGES[2:]), None, None, "a:1", TOOLS)
        for learned in (True, False):
            chosen, rejected = (one.tokens for one in renderer.comparison(kept, learned=learned).sequences)
            assert (chosen != rejected).sum() == 1


def test_answers_with_the_same_tokens_are_refused() -> None:
    tokenizer = FAMILIES["gemma"].tokenizer()  # whose template strips contents
    answers: list[Any] = [({"role": "assistant", "content": text},) for text in ("9", "8", "9 ")]
    row = Ranking(MESSAGES[:1], tuple(answers), (2.0, 1.0, 0.0), "a:1")
    for learned in (True, False):
        with pytest.raises(UserError, match="a:1: answers 1 and 3 have the same tokens, so there is nothing to prefer"):
            Renderer(tokenizer).comparison(row, learned=learned)


def test_reasoning_that_another_turn_repeats_is_still_left_out() -> None:
    turns: list[Any] = [{"role": "assistant", "content": "x", "reasoning_content": "E"} for _ in range(2)]
    row = Conversation((MORE[0], turns[0], MORE[6], turns[1]), None, "a:1")
    assert reasoning_left_out(row, [1, 3], "E x Thx E x") is None
    error = reasoning_left_out(row, [1, 3], "x Thx E x")
    assert error is not None and "the reasoning of message 3" in str(error)


@st.composite
def conversations(draw: st.DrawFn, family: str) -> Messages:
    """Turns of the assistant write 8, all others 7. No template writes either."""
    once = family in ("llama 3", "gpt-oss")
    thinks = family in ("qwen 3", "glm", "gpt-oss")
    eights, sevens = (st.integers(1, 3).map(digit.__mul__) for digit in ("8", "7"))
    messages: list[Any] = []

    def says(content: str, **others: Any) -> None:
        reasoning = {"reasoning_content": draw(eights)} if thinks and draw(st.booleans()) else {}
        messages.append({"role": "assistant", "content": content, **reasoning, **others})

    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(sevens)})
        for _ in range(draw(st.integers(0, 2))):
            calls = [
                call("up", {"s": draw(eights)}, f"call0000{k}") for k in range(1 if once else draw(st.integers(1, 2)))
            ]
            says("", tool_calls=calls)
            messages += [
                {"role": "tool", "content": draw(sevens), "tool_call_id": one.get("id"), "name": "up"} for one in calls
            ]
        says(draw(eights))
    return tuple(messages)


@settings(max_examples=40)
@given(st.data(), st.sampled_from(sorted(set(FAMILIES) - {"gemma"})))
def test_all_of_the_assistant_is_learned_once_and_nothing_else(data: st.DataObject, family: str) -> None:
    messages = data.draw(conversations(family))
    tokenizer = FAMILIES[family].tokenizer()
    (sequences,) = Renderer(tokenizer).learned_turns([row(family, messages)])
    learned = "".join(tokenizer.decode(sequence.tokens[sequence.loss_mask]) for sequence in sequences)
    written = json.dumps([message for message in messages if message["role"] == "assistant"])
    assert learned.count("8") == written.count("8") and "7" not in learned
