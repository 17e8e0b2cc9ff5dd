"""Episodes: what becomes of sampled ids and of what environments answer, token by token and in every outcome."""

from __future__ import annotations

import asyncio
import copy
import functools
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish import Observation, UserError
from burnish.errors import UserCodeError
from burnish.generate.protocol import Request, request_seed
from burnish.generate.sampling import Sampling
from burnish.render.renderer import Renderer
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import score
from burnish.rl.collect import sample_and_score, with_tools
from burnish.rl.environment import Environments
from burnish.types import Prompt, Trajectory
from chat_families import FAMILIES
from render.test_chat_families import (
    CASES,
    MESSAGES,
    OSS_9,
    OSS_ASKED,
    OSS_FINAL,
    OSS_OK,
    OSS_SQ,
    OSS_THINKS,
    OSS_UP,
    TOOLS,
    by_hand,
)
from scripted import ScriptedGenerator


def sq(x: int) -> int:
    """Square a number.

    Args:
        x: the number.
    """
    return int(x) ** 2  # some families write arguments as text, and the schemas of these tests name no types


def up(s: str) -> str:
    """Write in capitals.

    Args:
        s: the text.
    """
    return s.upper()


def sample(
    family: str,
    script: Callable[[str], str | tuple[str, str]],
    environments: Environments,
    rows: list[Prompt] | None = None,
    sampling: Sampling | None = None,
    **more: Any,
) -> list[Trajectory]:
    """Sample an episode of each row with a scripted generator."""
    tokenizer = FAMILIES[family].tokenizer()
    rows = with_tools(rows or [Prompt(MESSAGES[:1], {}, "chat.jsonl:1")], environments, tokenizer)
    stops = frozenset(tokenizer.convert_tokens_to_ids(token) for token in STOPS[family])
    requests = [
        Request(ids, request_seed(0, i, 0, 0), sampling or Sampling(max_new_tokens=500), stops)
        for i, ids in enumerate(Renderer(tokenizer).prompts(rows))
    ]
    generator = ScriptedGenerator(tokenizer, script, **more)
    return sample_and_score(rows, requests, environments.rewards([]), generator, tokenizer, environments)


STOPS = {
    "chatml": ["<|im_end|>"],
    "llama 3": ["<|eot_id|>"],
    "qwen 2.5": ["<|im_end|>"],
    "qwen 3": ["<|im_end|>"],
    "gemma": ["<end_of_turn>"],
    "mistral": ["</s>"],
    "glm": ["<|user|>", "<|observation|>"],
    "gpt-oss": ["<|call|>", "<|return|>"],
    "deepseek r1": ["<｜end▁of▁sentence｜>"],  # noqa: RUF001
    "phi": ["<|end|>"],
}
WHOLE = {
    "gpt-oss": (
        f"{OSS_ASKED}«{OSS_THINKS('A')}{OSS_SQ}»{OSS_9}«{OSS_THINKS('B')}{OSS_UP}»{OSS_OK}"
        f"«{OSS_THINKS('C')}{OSS_FINAL('9 OK')}<|return|>»"
    ),
}


# --- tokens in, tokens out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma"])
def test_an_episode_has_the_tokens_and_the_mask_written_by_hand(family: str) -> None:
    text = WHOLE.get(family) or CASES[family][2][-1]
    text = text[: [found.end() for found in re.finditer("»", text)][2]]  # the user says nothing more
    said = re.findall("«(.*?)»", text, re.DOTALL)
    turns = iter(said)
    environments = Environments(functions=[sq, up])
    environments.schemas = TOOLS
    (trajectory,) = sample(family, lambda _: next(turns), environments)
    tokenizer = FAMILIES[family].tokenizer()
    ids, mask = by_hand(text, FAMILIES[family], tokenizer)
    (sequence,) = trajectory.sequences
    assert tokenizer.decode(sequence.tokens) == re.sub("[«»]", "", text)
    assert sequence.tokens.tolist() == ids and sequence.loss_mask.tolist() == mask
    assert (sequence.arrays["sampler_logprobs"] == np.where(mask, -0.25, 0.0)).all()
    assert trajectory.finish_reason == "stop" and len(trajectory.turns) == 3
    assert [f"{call['function']}" for call in trajectory.tool_calls] == [
        "{'name': 'sq', 'arguments': {'x': '3'}}" if family == "glm" else "{'name': 'sq', 'arguments': {'x': 3}}",
        "{'name': 'up', 'arguments': {'s': 'ok'}}",
    ]
    assert [turn.replies[0]["content"] for turn in trajectory.turns[:2]] == ["9", "OK"]
    assert not trajectory.tool_errors


def test_a_template_without_tools_reads_calls_and_results_as_text() -> None:
    turns = iter(["<tool>sq(3)</tool><end_of_turn>", "<tool>up('ok')</tool><end_of_turn>", "9 OK<end_of_turn>"])
    (trajectory,) = sample("gemma", lambda _: next(turns), Environments(functions=[sq, up]))
    text = (
        "<bos><start_of_turn>user\n3, ok<end_of_turn>\n<start_of_turn>model\n«<tool>sq(3)</tool><end_of_turn>»\n"
        "<start_of_turn>user\n9<end_of_turn>\n<start_of_turn>model\n«<tool>up('ok')</tool><end_of_turn>»\n"
        "<start_of_turn>user\nOK<end_of_turn>\n<start_of_turn>model\n«9 OK<end_of_turn>»"
    )
    ids, mask = by_hand(text, FAMILIES["gemma"], FAMILIES["gemma"].tokenizer())
    assert trajectory.sequences[0].tokens.tolist() == ids and trajectory.sequences[0].loss_mask.tolist() == mask
    assert [call["function"]["name"] for call in trajectory.tool_calls] == ["sq", "up"]


class Ask:
    """Asks more questions, and ends the episode after the last one."""

    def __init__(self, questions: tuple[str, ...] = ("Thx",), reward: float = 0.5) -> None:
        self.questions, self.gives = list(questions), reward

    def respond(self, message: dict[str, Any]) -> Observation:
        """The next question."""
        if not self.questions:
            return Observation(done=True, reward=2 * self.gives)
        return Observation(self.questions.pop(0), reward=self.gives)


def test_a_template_that_rewrites_history_begins_a_new_sequence_of_the_same_trajectory() -> None:
    turns = iter(["<think>\nA\n</think>\n\n9<|im_end|>", "<think>\nB\n</think>\n\nBye<|im_end|>"])
    (trajectory,) = sample("qwen 3", lambda _: next(turns), Environments({"": Ask}, turns=True))
    first, second = trajectory.sequences
    asked = "<|im_start|>user\n3, ok<|im_end|>\n<|im_start|>assistant\n"
    for sequence, text in (
        (first, f"{asked}«<think>\nA\n</think>\n\n9<|im_end|>»"),
        (
            second,
            f"{asked}9<|im_end|>\n<|im_start|>user\nThx<|im_end|>\n<|im_start|>assistant\n"
            "«<think>\nB\n</think>\n\nBye<|im_end|>»",
        ),
    ):
        ids, mask = by_hand(text, FAMILIES["qwen 3"], FAMILIES["qwen 3"].tokenizer())
        assert sequence.tokens.tolist() == ids and sequence.loss_mask.tolist() == mask
    assert trajectory.finish_reason == "done" and trajectory.score == 1.5 == trajectory.rewards["environment"]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 1.0]
    assert trajectory.turns[0].message == {"role": "assistant", "content": "9", "reasoning_content": "A"}


def test_rewards_of_turns_lie_on_the_last_token_of_each_turn() -> None:
    environments = Environments({"": Ask}, turns=True, reward_at="turns")
    turns = iter(["Hi<|im_end|>", "Bye<|im_end|>"])
    (trajectory,) = sample("chatml", lambda _: next(turns), environments)
    rewards = trajectory.sequences[0].arrays["step_rewards"][trajectory.sequences[0].loss_mask]
    assert rewards.tolist() == [0, 0, 0.5, 0, 0, 0, 1.0] and trajectory.score == 1.5


@pytest.mark.parametrize("nothing", ["", (), []])
def test_an_observation_without_messages_ends_the_episode(nothing: str | tuple[()] | list[Any]) -> None:
    class Silent:
        def respond(self, message: dict[str, Any]) -> Observation:
            return Observation(nothing, reward=1)

    (trajectory,) = sample("chatml", lambda _: "Hi<|im_end|>", Environments({"": Silent}, turns=True))
    assert trajectory.finish_reason == "done" and trajectory.score == 1 and trajectory.turns[0].replies == ()


WORDS = st.sampled_from(
    ["", "a", " b\n", "<|im_end|>", "</tool_call>", "<think>", "{", "é", "\n\n"]
)  # also cut and broken
SAID = st.lists(WORDS, min_size=1, max_size=4).map("".join)
CALLS = st.sampled_from(["sq(3)", "up('x')", "up(s=3", "no()", "sq()"])


@settings(max_examples=150)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    answers=st.booleans(),
    contents=st.lists(st.tuples(SAID, CALLS, st.integers(1, 60)), min_size=1, max_size=4),
    result=SAID,
)
def test_sampled_ids_are_found_unchanged_and_nothing_else_is_learned(
    family: str, answers: bool, contents: list[tuple[str, str, int]], result: str
) -> None:
    tokenizer, said = FAMILIES[family].tokenizer(), []
    ends = STOPS[family][0]

    def script(prompt: str) -> tuple[str, str]:
        content, call, length = contents[min(len(said), len(contents) - 1)]
        text = WRITES.get(family, "<tool>{}</tool>").format(call) + content + ends
        ids = tokenizer.encode(text, add_special_tokens=False)
        cut = length < len(ids)
        # A text whose ids do not survive decoding: the first ids of a longer text, or ids that a text never has.
        said.append((prompt, ids[:length]))
        return tokenizer.decode(ids[:length]), "length" if cut else "stop"

    class Says:
        def respond(self, message: dict[str, Any]) -> Observation:
            return Observation(result or "?")

    environments = Environments({"": Says}, turns=True, max_turns=3) if answers else Environments(functions=[sq, up])
    (trajectory,) = sample(family, script, environments)
    sampled = [turn.tokens for turn in trajectory.turns]
    assert len(sampled) == len(said)
    spans = []
    for sequence in trajectory.sequences:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.loss_mask, [0]])))
        spans += [(sequence, start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    assert [end - start for _, start, end in spans] == sampled
    for (sequence, start, end), (prompt, ids) in zip(spans, said, strict=True):
        assert tokenizer.decode(sequence.tokens[:start]) == prompt
        assert tokenizer.decode(sequence.tokens[start:end]) == tokenizer.decode(ids)


WRITES = {
    "chatml": '<tool_call>{{"name": "sq", "arguments": {{"x": "{}"}}}}</tool_call>',
    "qwen 2.5": '<tool_call>\n{{"name": "sq", "arguments": {{"x": "{}"}}}}\n</tool_call>',
    "qwen 3": '<think>\nHm\n</think>\n\n<tool_call>\n{{"name": "sq", "arguments": {{"x": "{}"}}}}\n</tool_call>',
}


# --- what environments do -----------------------------------------------------------------------------------------


def calls(name: str = "act", arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><|im_end|>'


class Troubled:
    """A class whose methods do what an environment should not."""

    reward = 1.0

    def reset(self, trouble: str = "", **columns: Any) -> None:
        """Begin."""
        self.trouble = trouble
        if trouble == "reset":
            raise ValueError("no begin")

    def act(self) -> Any:
        """Act."""
        if self.trouble == "raise":
            raise ValueError("no \N{SNOWMAN}")
        if self.trouble == "exit":
            raise SystemExit(3)
        if self.trouble == "sleep":
            time.sleep(60)
        if self.trouble == "loop":
            while True:
                pass
        if self.trouble == "forward":
            return torch.nn.Linear(2, 2)(torch.ones(2)).sum().item() > 9
        return {"megabyte": "x" * 1_000_000, "object": object(), "nothing": None}.get(self.trouble, "fine")

    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(60)
        return ""


def prompt(text: str = "3, ok", **columns: Any) -> Prompt:
    return Prompt(({"role": "user", "content": text},), columns, f"rows.jsonl:{text}")


def test_trouble_becomes_a_message_and_a_count_and_the_others_go_on() -> None:
    troubles = ["reset", "raise", "exit", "sleep", "loop", "wait", "megabyte", "object", "nothing", "forward", "args"]
    troubles += ["unknown", "unparsable", "fine"]
    rows = [prompt(name, trouble=name) for name in troubles]

    def script(text: str) -> str:
        if "assistant" in text.removesuffix("<|im_start|>assistant\n"):
            return "Good<|im_end|>"
        name = next(n for n in troubles if f"user\n{n}<" in text)
        kinds = {"unparsable": "<tool_call>{</tool_call><|im_end|>", "args": calls("act", '{"x": 1}')}
        return kinds.get(name) or calls({"unknown": "akt", "wait": "wait"}.get(name, "act"))

    environments = Environments({"": Troubled}, timeout=0.2, max_tool_tokens=100)
    began = time.monotonic()
    trajectories = sample("chatml", script, environments, rows)
    assert time.monotonic() - began < 6  # code between two awaits has a second for its finally blocks
    of = dict(zip(troubles, trajectories, strict=True))
    assert of.pop("reset").finish_reason == "error"
    assert {t.finish_reason for t in of.values()} == {"stop"} and {t.text.split("\n")[-1] for t in of.values()} == {
        "Good"
    }
    assert {name: t.tool_errors for name, t in of.items()} == {
        "raise": ("raised",),
        "exit": ("raised",),
        "sleep": ("timeout",),
        "loop": ("timeout",),
        "wait": ("timeout",),
        "object": ("result",),
        "args": ("arguments",),
        "unknown": ("unknown",),
        "unparsable": ("unparsable",),
        **dict.fromkeys(("megabyte", "nothing", "forward", "fine"), ()),
    }
    said = {name: t.turns[0].replies[0]["content"] for name, t in of.items()}
    assert said["raise"] == "Error: ValueError: no \N{SNOWMAN}" and said["exit"] == "Error: SystemExit: 3"
    assert said["sleep"] == "Error: act exceeded its time limit of 0.2 seconds"
    assert said["megabyte"] == "x" * 100 + "\n[... cut off: 999,900 more characters]"
    assert said["object"] == "Error: act returned object, which is not text or JSON"
    assert said["unknown"] == "Error: there is no tool 'akt' (did you mean 'act'?); tools are act, wait"
    assert said["args"] == "Error: act: got an unexpected keyword argument 'x'"
    assert said["unparsable"].startswith("Error: the tool call cannot be read: ")
    assert (said["nothing"], said["forward"], said["fine"]) == ("", "false", "fine")
    assert {t.score for t in of.values()} == {1.0}


def test_what_a_template_rejects_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rejects = "{%- if m.tool_calls | length > 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}"
    start = "{%- for call in m.tool_calls"
    chatml = FAMILIES["chatml"]
    monkeypatch.setitem(FAMILIES, "chatml", chatml._replace(template=chatml.template.replace(start, rejects + start)))
    two = calls("sq", '{"x": 3}').removesuffix("<|im_end|>") + calls("up", '{"s": "a"}')
    turns = iter([two, "9 A<|im_end|>"])
    (t,) = sample("chatml", lambda _: next(turns), Environments(functions=[sq, up]))
    assert t.finish_reason == "stop" and [call["function"]["name"] for call in t.tool_calls] == ["sq", "up"]
    assert [(m["role"], m["content"]) for m in t.messages[1:3]] == [("user", "9"), ("user", "A")]


class Broken:
    def respond(self, message: dict[str, Any]) -> Any:
        if "x" in message["content"]:
            raise ValueError("broken")
        return "text is no observation" if "y" in message["content"] else Observation(done=True, reward=1)


def test_a_turn_environment_that_fails_ends_its_episode_only(caplog: pytest.LogCaptureFixture) -> None:
    rows = [prompt(text) for text in ("x", "y", "z")]
    environments = Environments({"": Broken}, turns=True)
    trajectories = sample("chatml", lambda p: p.split("user\n")[1][0] + "<|im_end|>", environments, rows)
    assert [(t.finish_reason, t.score) for t in trajectories] == [("error", 0.0), ("error", 0.0), ("done", 1.0)]
    (warning,) = [r.message for r in caplog.records if "finish reason error" in r.message]
    assert "environment Broken raised ValueError on rows.jsonl:x: broken" in warning


def test_an_environment_that_always_fails_stops_the_run() -> None:
    rows = [prompt("x") for _ in range(8)]
    with pytest.raises(UserCodeError, match=r"environment Broken raised ValueError on rows\.jsonl:x: broken"):
        sample("chatml", lambda _: "x<|im_end|>", Environments({"": Broken}, turns=True), rows)


def test_limits_end_episodes() -> None:
    def finished(sampling: Sampling | None = None, text: str = calls("up", '{"s": "a"}'), **limits: Any) -> list[Any]:
        (t,) = sample("chatml", lambda _: text, Environments(functions=[sq, up], **limits), sampling=sampling)
        assert limits.get("max_tokens", 9999) >= len(t.sequences[0]) - t.turns[0].prompt_tokens
        return [t.finish_reason, len(t.turns), len(t.turns[-1].replies)]

    assert finished(max_turns=3) == ["turns", 3, 1]
    turn = len('<tool_call>{"name": "up", "arguments": {"s": "a"}}</tool_call>') + 1
    assert finished(max_tokens=2 * turn) == ["length", 2, 0]  # the second turn is cut
    assert finished(max_tokens=turn + 20) == ["length", 1, 1]  # the answer leaves no room
    assert finished(Sampling(max_new_tokens=turn - 9)) == ["length", 1, 0]
    assert finished(text="Hi<|im_end|>") == ["stop", 1, 0]


def test_wrong_environments_are_named_at_once() -> None:
    class NoReset:
        def act(self) -> str:
            """Act."""
            return ""

    class Nothing:
        def reset(self) -> None: ...

    class Rewarded(Ask):
        reward = 1.0

    class Bare:
        def reset(self) -> None: ...
        def act(self, x):
            return x

    for classes, functions, turns, message in (
        (NoReset, [], False, r"environment NoReset: needs a method reset\(\*\*columns\)"),
        (Nothing, [], False, "environment Nothing: has no public method besides reset"),
        (Nothing, [], True, r"a turn environment needs a method respond\(message\); for tools, set class:"),
        (Rewarded, [], True, r"turn environments give rewards as Observation\(reward=...\)"),
        (Ask, [], False, "has a method respond, as turn environments have: set turns: instead of class:"),
        (Bare, [], False, r"tool act: .*\(a tool needs type hints, and a docstring"),
        (Troubled, [Troubled.act], False, "its method act has the name of a function in tools:"),
        (None, [], False, "no environment and no tools"),
        (None, [sq, sq], False, "two tools are named sq"),
    ):
        with pytest.raises(UserError, match=message):
            Environments({"": classes} if classes else {}, functions, turns)


def test_rows_choose_one_of_several_environments() -> None:
    environments = Environments({"ask": Ask, "broken": Broken}, turns=True)
    rows = [prompt("z", environment="broken"), prompt("z", environment="ask")]
    turns = [len(t.turns) for t in sample("chatml", lambda _: "z<|im_end|>", environments, rows)]
    assert turns == [1, 2]
    with pytest.raises(UserError, match=r"rows.jsonl:z: 'aks' is not a known environment \(did you mean 'ask'\?\)"):
        sample("chatml", lambda _: "z<|im_end|>", environments, [prompt("z", environment="aks")])


def test_an_environment_without_a_reward_needs_another_one() -> None:
    class Silent(Troubled):
        reward = None

    with pytest.raises(UserError, match=r"rows\.jsonl:z: the environment ended an episode without a reward"):
        sample("chatml", lambda _: "z<|im_end|>", Environments({"": Silent}), [prompt("z")])


def test_ctrl_c_interrupts_an_environment_that_hangs() -> None:
    interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    interrupt.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sample("chatml", lambda _: calls(), Environments({"": Troubled}), [prompt("z", trouble="sleep")])
    assert time.monotonic() - began < 5


# --- TRL's contract -----------------------------------------------------------------------------------------------
# Written after TRL's documentation of environment_factory: reset(**kwargs) may return text for the last message of the
# user, public methods are tools, and rewards read attributes.


class Echo:
    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.reward = 0.0
        return " Echo a word."

    def echo(self, message: str) -> str:
        """
        Echo the message back.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = len(message) / 10
        return message


class Counter:
    def reset(self, start: int = 0, **kwargs: Any) -> None:
        self.count, self.done = start, False

    def increment(self, step: int = 1) -> int:
        """
        Increment the counter.

        Args:
            step: How much to add.

        Returns:
            The new value.
        """
        self.count += step
        self.done = self.count >= 5
        return self.count

    def _hidden(self) -> None: ...

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return float(self.count)


class Word:
    """A guessing game that raises if the game is over."""

    def reset(self, prompt: list[dict[str, str]], word: str, **kwargs: Any) -> str:
        self.word, self.reward = word, 0.0
        return f" It has {len(word)} letters."

    async def guess(self, guess: str) -> str:
        """
        Guess the word.

        Args:
            guess: The guessed word.
        """
        if self.reward:
            raise ValueError("Game over.")
        await asyncio.sleep(0)
        self.reward = float(guess == self.word)
        return "".join(a if a == b else "_" for a, b in zip(guess, self.word, strict=False))


def test_classes_in_trls_contract_run_unchanged() -> None:
    def once(*texts: str) -> Callable[[str], str]:
        turns = iter(texts)
        return lambda _: next(turns)

    (t,) = sample("chatml", once(calls("echo", '{"message": "hello"}'), "Ok<|im_end|>"), Environments({"": Echo}))
    assert t.prompt[-1]["content"] == "3, ok Echo a word." and t.score == 0.5 and t.messages[1]["content"] == "hello"
    row = prompt(start=2)
    (t,) = sample(
        "chatml", once(calls("increment"), calls("increment", '{"step": 2}')), Environments({"": Counter}), [row]
    )
    assert (t.score, t.finish_reason, [turn.replies[0]["content"] for turn in t.turns]) == (5.0, "done", ["3", "5"])
    row = prompt(word="cat")
    guesses = [calls("guess", f'{{"guess": "{word}"}}') for word in ("cut", "cat", "cat")]
    (t,) = sample("chatml", once(*guesses, "Ok<|im_end|>"), Environments({"": Word}), [row])
    assert t.prompt[-1]["content"] == "3, ok It has 3 letters."
    assert [m["content"] for m in t.messages if m["role"] == "tool"] == ["c_t", "cat", "Error: ValueError: Game over."]
    assert t.score == 1.0 and t.tool_errors == ("raised",)
    names = [schema["function"]["name"] for schema in Environments({"": Counter}).kinds[""].schemas]
    assert names == ["increment"]


# --- seeds and waves ----------------------------------------------------------------------------------------------


class Dice:
    """Random numbers from everywhere."""

    def reset(self, seed: int, **columns: Any) -> str:
        """Begin."""
        return f" {seed} {random.random()} {np.random.rand()} {torch.rand(1).item()}"

    async def roll(self) -> str:
        """Roll."""
        first = random.random()
        await asyncio.sleep(random.random() / 100)
        return f"{first} {random.random()} {torch.rand(1).item()}"


def test_an_episode_does_not_depend_on_others_nor_on_the_order_of_their_ends() -> None:
    def run(rows: list[Prompt]) -> list[Trajectory]:
        said: dict[str, int] = {}

        def script(text: str) -> str:
            name = text.split("user\n")[1][0]
            said[name] = said.get(name, 0) + 1
            return calls("roll") if said[name] <= ord(name) - ord("a") + 1 else "Ok<|im_end|>"

        return sample("chatml", script, Environments({"": Dice}), rows)

    state = random.getstate(), torch.get_rng_state().tolist()
    rows = [prompt(name) for name in "abc"]
    whole = run(rows)
    assert [len(t.turns) for t in whole] == [2, 3, 4]
    assert run(rows) == whole and run(rows[:1]) == whole[:1]
    assert len({t.prompt[-1]["content"][1:] for t in whole}) == 3
    assert (random.getstate(), torch.get_rng_state().tolist()) == state


def test_a_wave_is_one_plan_of_all_open_episodes_in_blocks_of_four_for_each_slot() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    environments = Environments({"": Ask}, turns=True, arguments={"questions": ("1", "2")}, max_turns=3)
    rows = [prompt(name) for name in "abcde"]
    requests = [Request(ids, i, Sampling(), frozenset()) for i, ids in enumerate(Renderer(tokenizer).prompts(rows))]
    generator = ScriptedGenerator(tokenizer, lambda _: "z<|im_end|>", slots=1)
    trajectories = sample_and_score(rows, requests, environments.rewards([]), generator, tokenizer, environments)
    assert [len(plan) for plan in generator.plans] == [4, 4, 4, 1, 1, 1]
    kept = [{request.keep_cache for request in plan} for plan in generator.plans]
    assert kept == [{True}, {True}, {False}] * 2, "nothing follows a third turn"
    seeds = [[request.seed for request in plan] for plan in generator.plans]
    assert len({seed for plan in seeds for seed in plan}) == 15 and seeds[0] == [0, 1, 2, 3] and seeds[3] == [4]
    assert [t.source for t in trajectories] == [row.source for row in rows]


def test_threads_run_methods_that_wait_at_the_same_time() -> None:
    class Slow(Troubled):
        def act(self) -> str:
            """Act."""
            time.sleep(0.2)
            return "slow"

    rows = [prompt(str(i)) for i in range(8)]
    script = lambda text: "Ok<|im_end|>" if "slow" in text else calls()  # noqa: E731
    began = time.monotonic()
    trajectories = sample("chatml", script, Environments({"": Slow}, threads=8), rows)
    assert time.monotonic() - began < 1.2
    assert {t.turns[0].replies[0]["content"] for t in trajectories} == {"slow"}


# --- what the user's code may do ----------------------------------------------------------------------------------


def once(*texts: str) -> Callable[[str], str]:
    turns = iter(texts)
    return lambda _: next(turns)


class Deck:
    """Changes everything that it is given."""

    reward = 0.0

    def __init__(self, hidden: list[int]) -> None:
        self.hidden = hidden

    def reset(self, cards: list[int], **columns: Any) -> str:
        """Begin."""
        self.cards = cards
        columns["prompt"][0]["content"] = "changed"
        return f" {self.hidden.pop()} {self.cards.pop()}"

    def put(self, items: list[int]) -> int:
        """Put cards.

        Args:
            items: the cards.
        """
        items.append(self.cards.pop())
        return self.hidden.pop()


class Mutates:
    def respond(self, message: dict[str, Any], /) -> Observation:
        message["content"] = "changed"
        message.clear()
        return Observation("?", done=True)


def test_what_an_environment_changes_does_not_reach_other_episodes() -> None:
    environments = Environments({"": Deck}, arguments={"hidden": [1, 2]})
    row = prompt(cards=[3, 4])
    script = lambda text: "Ok<|im_end|>" if "role" in text or "tool" in text else calls("put", '{"items": [7]}')  # noqa: E731
    for t in [t for _ in range(2) for t in sample("chatml", script, environments, [row, row])]:
        assert t.prompt[-1]["content"] == "3, ok 2 4" and t.turns[0].replies[0]["content"] == "1"
        assert t.tool_calls[0]["function"]["arguments"] == {"items": [7]}
    assert row.columns == {"cards": [3, 4]} and environments.arguments == {"hidden": [1, 2]}
    (t,) = sample("chatml", once("Hi<|im_end|>"), Environments({"": Mutates}, turns=True))
    assert t.finish_reason == "done" and t.turns[0].message == {"role": "assistant", "content": "Hi"}


class Finish:
    """A tool named like the attribute that ends an episode, and a reward that exists only later."""

    def reset(self, **columns: Any) -> None:
        self.right = 0.25

    def done(self) -> str:
        """Say that you are done."""
        self.right += 0.5
        return "noted"

    @property
    def reward(self) -> float:
        return self.right


def test_a_tool_may_be_named_done_and_a_reward_may_be_a_property() -> None:
    environments = Environments({"": Finish})
    assert environments.has_reward
    (t,) = sample("chatml", once(calls("done"), "Ok<|im_end|>"), environments)
    assert t.finish_reason == "stop" and len(t.turns) == 2 and t.score == 0.75


class Kinds:
    """Tools of all kinds of methods."""

    reward = 0.0

    def reset(self) -> None: ...

    @classmethod
    def of_class(cls) -> str:
        """Name the class."""
        return cls.__name__

    @staticmethod
    def static(x: int) -> np.int64:
        """Give a number of numpy.

        Args:
            x: the number.
        """
        return np.int64(x)

    @functools.lru_cache  # noqa: B019
    def remembered(self) -> list[Any]:
        """Give an array of numpy."""
        return [np.ones(2), np.float32(0.5)]

    def _hidden(self) -> str:
        """Be called by another name."""
        return "alias"

    public = _hidden


def test_methods_of_every_kind_are_tools_by_their_names() -> None:
    environments = Environments({"": Kinds})
    names = ["of_class", "public", "remembered", "static"]
    assert sorted(schema["function"]["name"] for schema in environments.kinds[""].schemas) == names
    asked = [calls("of_class"), calls("static", '{"x": 3}'), calls("remembered"), calls("public"), "Ok<|im_end|>"]
    (t,) = sample("chatml", once(*asked), environments)
    said = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert said == ["Kinds", "3", "[[1.0, 1.0], 0.5]", "alias"] and not t.tool_errors


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Raises:
    reward = 0.0

    def reset(self) -> None: ...

    def act(self) -> None:
        """Act."""
        raise Unprintable

    def long(self, function: str) -> None:
        """Act.

        Args:
            function: a name that our own functions have, too.
        """
        raise ValueError({function: "y" * 1_000_000})


@pytest.mark.parametrize("threads", [0, 1])
def test_an_exception_without_a_text_is_an_error_of_its_tool_only(threads: int) -> None:
    environments = Environments({"": Raises}, threads=threads)
    (t,) = sample("chatml", once(calls("act"), calls("long", '{"function": "x"}'), "Ok<|im_end|>"), environments)
    assert t.finish_reason == "stop" and t.tool_errors == ("raised", "raised")
    first, second = (m["content"] for m in t.messages if m["role"] == "tool")
    assert first.startswith("Error: Unprintable") and second.startswith("Error: ValueError: {'x': 'yyy")
    assert len(second) < 600


def test_functions_that_cannot_be_tools_are_named() -> None:
    def unknown(x: "Unknown") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
        """Act.

        Args:
            x: something.
        """

    class IsReward:
        def reset(self) -> None: ...
        def act(self) -> str:
            """Act."""
            return ""

        def reward(self) -> float:
            """Give the reward."""
            return 1.0

    for function, message in (
        (functools.partial(sq, 3), "tools: .* is no function: expected functions"),
        (lambda x: x, "tool <lambda>: .*no docstring"),
        (unknown, "tool unknown: .*'Unknown' is not defined"),
    ):
        with pytest.raises(UserError, match=message):
            Environments(functions=[function])
    with pytest.raises(UserError, match=r"environment IsReward: reward is a method: .* get_reward"):
        Environments({"": IsReward})


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "high", [1.0]])
def test_a_reward_that_is_no_number_ends_its_episode(reward: Any) -> None:
    class Wrong(Raises):
        def get_reward(self) -> Any:
            return reward

    class Game:
        def respond(self, message: dict[str, Any]) -> Observation:
            return Observation("?", reward=reward)

    for environments in (Environments({"": Wrong}), Environments({"": Game}, turns=True)):
        (t,) = sample("chatml", once("Ok<|im_end|>"), environments)
        assert t.finish_reason == "error" and t.score == 0


def test_two_results_in_a_template_whose_roles_alternate() -> None:
    two = "<tool>sq(3)</tool><tool>up('a')</tool><end_of_turn>"
    (t,) = sample("gemma", once(two, "9 A<end_of_turn>"), Environments(functions=[sq, up]))
    assert t.finish_reason == "stop" and len(t.turns) == 2
    assert [(m["role"], m["content"]) for m in t.messages[1:-1]] == [("user", "9\nA")]


def test_time_in_the_queue_of_threads_does_not_count_and_a_hanging_call_frees_its_place() -> None:
    class Slow(Troubled):
        def act(self) -> str:
            """Act."""
            time.sleep(60 if self.trouble == "sleep" else 0.2)
            return "slow"

    rows = [prompt(str(i), trouble="sleep" if i == 0 else "") for i in range(5)]
    script = lambda text: "Ok<|im_end|>" if "slow" in text or "Error" in text else calls()  # noqa: E731
    trajectories = sample("chatml", script, Environments({"": Slow}, threads=1, timeout=0.5), rows)
    assert [t.tool_errors for t in trajectories] == [("timeout",), (), (), (), ()]


def test_what_a_reward_changes_does_not_reach_the_trajectory() -> None:
    def changes(trajectories: list[Trajectory]) -> list[float]:
        for t in trajectories:
            t.messages[0].clear()  # type: ignore[attr-defined]
            t.tool_calls[0]["function"]["arguments"].clear()
        return [0.0 for _ in trajectories]

    (t,) = sample("chatml", once(calls("sq", '{"x": 3}'), "Ok<|im_end|>"), Environments(functions=[sq]))
    before = copy.deepcopy(t)
    score([t], [NamedReward("changes", 1.0, changes)])
    assert t == before


def test_what_reset_adds_may_be_rejected_by_the_template() -> None:
    class Again(Troubled):
        def reset(self, trouble: str = "", **columns: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.trouble = trouble
            return [{"role": "user", "content": "again"}] if trouble else "!"

    rows = [prompt("a", trouble="two messages of the user"), prompt("b")]
    bad, good = sample("gemma", lambda _: "Ok<end_of_turn>", Environments({"": Again}), rows)
    assert (bad.finish_reason, bad.turns, bad.score) == ("error", (), 0.0)
    assert (good.finish_reason, good.prompt[-1]["content"]) == ("stop", "b!")


@pytest.mark.parametrize("at", ["end", "turns"])
def test_an_episode_without_turns_has_no_tokens_and_no_score(at: str) -> None:
    class NeverBegins(Ask):
        def reset(self) -> None:
            raise ValueError("no begin")

    (t,) = sample("chatml", once(), Environments({"": NeverBegins}, turns=True, reward_at=at))
    assert (t.finish_reason, t.turns, t.score, len(t.tokens)) == ("error", (), 0.0, 0)


def test_messages_that_cannot_be_written_down_end_the_episode() -> None:
    class Odd:
        def respond(self, message: dict[str, Any]) -> Observation:
            odd: Any = {"role": "user", "content": "?", "name": object()}
            return Observation([odd])

    (t,) = sample("chatml", once("Hi<|im_end|>"), Environments({"": Odd}, turns=True))
    assert t.finish_reason == "error" and t.turns[0].replies == ()


def test_ids_of_calls_are_unique_in_a_message() -> None:
    own = '[TOOL_CALLS] [{"name": "sq", "arguments": {"x": 3}, "id": "abcdefghi"}'
    two = own + ', {"name": "up", "arguments": {"s": "a"}, "id": "abcdefghi"}]</s>'
    (t,) = sample("mistral", once(two, "9 A</s>"), Environments(functions=[sq, up]))
    ids = [call.get("id") for call in t.tool_calls]
    assert ids[0] == "abcdefghi" and len(set(ids)) == 2
    assert [m.get("tool_call_id") for m in t.messages if m["role"] == "tool"] == ids


def test_a_column_environment_that_is_no_name() -> None:
    environments = Environments({"ask": Ask}, turns=True)
    with pytest.raises(UserError, match=r"rows\.jsonl:z: \['ask'\] is not a known environment"):
        sample("chatml", lambda _: "z<|im_end|>", environments, [prompt("z", environment=["ask"])])
