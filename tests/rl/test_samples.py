"""Episodes as rows: what a person reads of them in samples.jsonl, and what methods learn of what ``sample`` wrote."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from builders import llama
from burnish import Observation
from burnish.cli import app
from burnish.data.recognition import parse
from burnish.methods.sample import _learnable, _rankings
from burnish.render.renderer import Renderer
from burnish.render.spans import learned_spans
from burnish.rl.environment import Environments
from burnish.rl.metrics import completed_row, sample_rows
from burnish.types import Conversation, Prompt, Ranking, Sequence, Trajectory
from chat_families import FAMILIES
from render.test_chat_families import CASES, TOOLS
from rl.test_episodes import WHOLE, sample, sq, up
from scripted import ScriptedGenerator
from tiny_runs import entries, json_rows


class Game:
    """A turn environment that counts to two."""

    def __init__(self) -> None:
        self.turns = 0

    def respond(self, message: dict[str, Any]) -> Observation:
        """Half a point for each turn."""
        self.turns += 1
        return Observation("Again.", done=self.turns == 2, reward=0.5)


def square(x: int) -> int:
    """Square a number.

    Args:
        x: the number.
    """
    if x > 9:
        raise ValueError("too large")
    return x**2


def asks(x: Any) -> str:
    """A turn that calls ``square``, as Qwen writes it."""
    return f'<tool_call>\n{{"name": "square", "arguments": {{"x": {json.dumps(x)}}}}}\n</tool_call><|im_end|>'


def squares(*turns: str) -> Trajectory:
    """An episode with these turns."""
    said = iter(turns)
    (trajectory,) = sample("qwen 2.5", lambda _: next(said), Environments(functions=[square]))
    return trajectory


def reread(row: dict[str, Any], kind: type[Any]) -> Any:
    """The row that is read from a line of a file."""
    return parse(json.loads(json.dumps(row)), (kind,), "s.jsonl:1")


# --- what a person reads ------------------------------------------------------------------------------------------


def test_a_sample_of_an_episode_by_hand() -> None:
    tokenizer = FAMILIES["qwen 2.5"].tokenizer()
    trajectory = squares(asks(10), asks(3), "9<|im_end|>")
    (row,) = sample_rows([trajectory], "train", tokenizer)
    call = {"name": "square", "arguments": {"x": 10}}
    assert row["messages"][0] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call, "id": "000000000"}],
        "errors": ["raised"],
    }
    assert row["messages"][1]["content"] == "Error: ValueError: too large" and row["messages"][1]["role"] == "tool"
    assert "errors" not in row["messages"][2] and row["messages"][3]["content"] == "9"
    assert row["messages"][-1] == {"role": "assistant", "content": "9"} and row["finish_reason"] == "stop"
    (spans,) = row["sequences"]
    assert "".join(span["text"] for span in spans) == tokenizer.decode(trajectory.sequences[0].tokens)
    assert [span["text"] for span in spans if span["learned"]] == [asks(10), asks(3), "9<|im_end|>"]
    assert "Square a number." in spans[0]["text"] and not spans[0]["learned"]


def test_samples_say_what_each_turn_was_worth_and_where_it_was_cut() -> None:
    turns = iter(["a<|im_end|>", ("b", "length")])
    environments = Environments({"": Game}, turns=True, reward_at="turns")
    (trajectory,) = sample("qwen 2.5", lambda _: next(turns), environments)
    (row,) = sample_rows([trajectory], "eval", FAMILIES["qwen 2.5"].tokenizer())
    again = {"role": "user", "content": "Again."}
    assert row["messages"] == [
        {"role": "assistant", "content": "a", "reward": 0.5},
        again,
        {"role": "assistant", "content": "b", "finish_reason": "length", "reward": 0.5},
        again,
    ]
    assert row["finish_reason"] == "done" and row["score"] == 1.0
    plain = Trajectory.from_text("4", ({"role": "user", "content": "2+2"},), tokens=[7])
    assert {"messages", "sequences"}.isdisjoint(sample_rows([plain], "eval", None)[0])


@pytest.mark.parametrize("mask", [[False] * 6, [False, True, True, False, True, False], [False] + [True] * 5])
def test_spans_join_to_the_text(mask: list[bool]) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    ids = tokenizer.encode("né 1ü")
    assert len(ids) == 7  # bytes; a character may begin in one span and end in the next
    spans = learned_spans(Sequence(ids[:6], mask, "a:1"), tokenizer)
    assert [span["learned"] for span in spans] == [bool(key) for key in np.array(mask)[np.r_[True, np.diff(mask) != 0]]]
    assert "".join(span["text"] for span in spans).replace("\ufffd", "")[-1:] == "1"


# --- what methods learn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma"])
def test_sft_on_a_sample_learns_exactly_what_was_sampled(family: str) -> None:
    text = WHOLE.get(family) or CASES[family][2][-1]
    turns = iter(re.findall("«(.*?)»", text, re.DOTALL)[:3])
    environments = Environments(functions=[sq, up])
    environments.schemas = TOOLS
    (trajectory,) = sample(family, lambda _: next(turns), environments)
    row = completed_row(trajectory)
    assert _learnable(row) and row["completion"] == list(trajectory.messages)
    renderer = Renderer(FAMILIES[family].tokenizer())
    (sequences,) = renderer.learned_turns([reread(row, Conversation)])
    sampled = trajectory.sequences[0]
    learned = [s.tokens[s.loss_mask].tolist() for s in sequences]
    assert [id for ids in learned for id in ids] == sampled.tokens[sampled.loss_mask].tolist()
    if len(sequences) == 1:
        assert sequences[0].tokens[: len(sampled)].tolist() == sampled.tokens.tolist()


def test_sft_on_a_sample_learns_what_was_sampled_if_the_template_rewrites_turns() -> None:
    turns = iter(f"<think>\n{x}\n</think>\n\n{x}<|im_end|>" for x in "ab")
    (trajectory,) = sample("qwen 3", lambda _: next(turns), Environments({"": Game}, turns=True))
    assert len(trajectory.sequences) == 2
    row = completed_row(trajectory)
    renderer = Renderer(FAMILIES["qwen 3"].tokenizer())
    (sequences,) = renderer.learned_turns([reread(row, Conversation)])
    for read, sampled in zip(sequences, trajectory.sequences, strict=True):
        assert read.tokens[: len(sampled)].tolist() == sampled.tokens.tolist()
        assert read.loss_mask[: len(sampled)].tolist() == sampled.loss_mask.tolist()
        assert read.loss_mask.sum() == sampled.loss_mask.sum()


def test_a_completion_ends_with_the_last_message_of_the_policy() -> None:
    environments = Environments({"": Game}, turns=True)
    prompt = Prompt(({"role": "system", "content": "Count."}, {"role": "user", "content": "Go."}), {"n": 2}, "a:1")
    (trajectory,) = sample("chatml", lambda _: "one<|im_end|>", environments, [prompt])
    row = completed_row(trajectory)
    assert [message["role"] for message in row["completion"]] == ["assistant", "user", "assistant"]
    assert row["prompt"] == list(prompt.messages) and row["meta"] == {"n": 2} and row["rewards"] == {"environment": 1.0}


@pytest.mark.parametrize(
    "turns",
    [
        ["<|im_end|>"],
        [asks(3), "<|im_end|>"],
        [asks([[]]).replace("[[]]", "[" * 99 + "]" * 99), "9<|im_end|>"],  # nested more deeply than rows may be
    ],
)
def test_an_episode_that_methods_cannot_read_is_left_out(turns: list[str]) -> None:
    assert not _learnable(completed_row(squares(*turns)))
    assert _learnable(completed_row(squares(asks(3), "9<|im_end|>")))


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", ["a\udfff"], {"\ud800": 1}])
def test_a_call_with_a_value_that_cannot_be_written_is_an_error_that_the_model_sees(value: Any) -> None:
    trajectory = squares(asks(value), "9<|im_end|>")
    assert trajectory.tool_errors == ("unparsable",) and _learnable(completed_row(trajectory))
    assert "a value of square cannot be written" in trajectory.turns[0].replies[0]["content"]


def test_half_of_a_surrogate_pair_in_what_an_environment_says_is_escaped() -> None:
    def half(x: int) -> Any:
        """Return a text.

        Args:
            x: the kind.
        """
        if x == 0:
            raise ValueError("\ud800")
        return "\ud800" if x == 1 else {"a": "\ud800"}

    turns = iter([asks(x).replace("square", "half") for x in range(3)] + ["9<|im_end|>"])
    (trajectory,) = sample("qwen 2.5", lambda _: next(turns), Environments(functions=[half]))
    said = [turn.replies[0]["content"] for turn in trajectory.turns[:3]]
    assert said == ["Error: ValueError: \\ud800", "\\ud800", '{"a": "\\ud800"}']

    class Halves:
        def reset(self, **columns: Any) -> str:
            return "\ud800"

        def respond(self, message: Any) -> Observation:
            return Observation([{"role": "user", "content": "\udfff"}], done=True)

    (trajectory,) = sample("qwen 2.5", lambda _: "9<|im_end|>", Environments({"": Halves}, turns=True))
    assert trajectory.prompt[-1]["content"].endswith("\\ud800")
    assert trajectory.turns[0].replies[0]["content"] == "\\udfff"


def test_episodes_are_ranked_as_conversations_of_which_the_policys_turns_are_learned() -> None:
    tokenizer = FAMILIES["qwen 2.5"].tokenizer()
    good, bad = squares(asks(3), "9<|im_end|>"), squares(asks(4), "16<|im_end|>")
    samples = [completed_row(t) | {"score": score} for t, score in ((good, 1.0), (bad, 0.0), (good, 1.0))]
    (row,) = _rankings(samples)
    ranking = reread(row, Ranking)
    assert ranking.scores == (1.0, 0.0) and ranking.tools == good.tools
    example = Renderer(tokenizer).comparison(ranking, learned=True)
    for sequence, trajectory in zip(example.sequences, (good, bad), strict=True):
        assert [span["text"] for span in learned_spans(sequence, tokenizer) if span["learned"]] == [
            turn.text + "<|im_end|>" for turn in trajectory.turns
        ]
    other = [{**one, "prompt": "Another."} for one in samples]
    assert len(_rankings(samples + other)) == 2  # the environment began two episodes in different ways
    assert _rankings(samples[:1] + other[1:2]) == []


def test_completions_without_scores_are_candidates_for_a_judge() -> None:
    samples = [{"prompt": "1+1", "completion": completion} for completion in ("2", "3", "2")]
    assert _rankings(samples) == [{"prompt": "1+1", "completions": ["2", "3"], "scores": [0.0, 0.0]}]
    assert _rankings(samples[::2]) == []  # only one distinct completion


TOOL = '''
def square(x: int) -> int:
    """Square a number.

    Args:
        x: the number.
    """
    return x ** 2


def right(trajectories):
    return [float(t.text.endswith("9")) for t in trajectories]
'''
RECIPE = """
name: act
threads: 1
stages:
  - name: grow
    method: {name: sample}
    model: model
    tools: ["mine.py:square"]
    reward: [{function: "mine.py:right"}]
    generation: {samples: 2, max_new_tokens: 80}
    data: {rows: prompts.jsonl}
  - name: improve
    method: {name: sft}
    model: model
    data: {train: {stage: grow, file: samples.jsonl}, select: {above: 0.5}}
    trainer: {per_device_train_batch_size: 2}
  - name: prefer
    method: {name: dpo}
    model: model
    data: {train: {stage: grow, file: ranked.jsonl}}
    trainer: {per_device_train_batch_size: 2}
"""


def test_a_pipeline_samples_with_tools_and_learns_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = FAMILIES["qwen 2.5"].tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained("model")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": 0, "pad_token_id": tokenizer.eos_token_id}
    llama(vocab_size=len(tokenizer), max_position_embeddings=2048, **ends).save_pretrained("model")
    Path("mine.py").write_text(TOOL, "utf-8")
    Path("act.yaml").write_text(RECIPE, "utf-8")
    prompts = [{"prompt": f"What is {n} squared?"} for n in (3, 4, 7, 9)]
    Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    tried: dict[str, int] = {}

    def writes(prompt: str) -> str:
        x = int(re.findall(r"What is (\d+) squared", prompt)[-1])
        if "<tool_response>" not in prompt:
            tried[prompt] = tried.get(prompt, 0) + 1
            return asks(x if tried[prompt] == 1 else x + 2)
        return re.findall(r"<tool_response>\n(\d+)", prompt)[-1] + "<|im_end|>"

    def factory(settings: Any, critic: Any = None, frozen: bool = False) -> Callable[..., ScriptedGenerator]:
        return lambda model, tokenizer: ScriptedGenerator(tokenizer, writes)

    monkeypatch.setattr("burnish.config.row_stage.factory", factory)
    result = CliRunner().invoke(app, ["run", "act.yaml"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    folder = Path("runs/act")
    rows = json_rows(folder / "grow/data/samples.jsonl")
    assert len(rows) == 8 and all(len(row["completion"]) == 3 and row["tools"] for row in rows)
    results = entries(folder)["grow"]["results"]["after"]
    assert (results["eval_turns"], results["eval_tool_calls"], results["eval_tool_error_raised"]) == (2, 1, 0)
    assert entries(folder)["improve"]["rows"]["train"]["rows"] == 2  # the squares 9 and 49 end with 9
    assert len(json_rows(folder / "grow/data/ranked.jsonl")) == 2
    assert entries(folder)["prefer"]["rows"]["train"]["rows"] == 2
