"""Second attempts at sums: the environment, and the conversations that the model learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from burnish import Observation
from burnish.errors import UserError
from burnish.recipes import self_correct as recipe
from burnish.render.renderer import Renderer
from burnish.types import Conversation, Message

SIZES: dict[str, Any] = {"rows": 3000, "prompts": 100, "held_out": 64}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    recipe.prepare(folder, 0, **SIZES)
    return folder


def test_the_same_seed_writes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    recipe.prepare(tmp_path / "same", 0, **SIZES)
    recipe.prepare(tmp_path / "other", 1, **SIZES)
    for name in ("data/sft.jsonl", "data/corrections-eval.jsonl", "model/model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_no_question_is_both_trained_and_evaluated(made: Path) -> None:
    data = made / "data"
    seen = {row["messages"][0]["content"] for row in read(data / "sft.jsonl")}
    seen |= {row["prompt"] for row in read(data / "prompts.jsonl")}
    unseen = [row["prompt"] for row in read(data / "prompts-eval.jsonl")]
    assert unseen == [row["prompt"][0]["content"] for row in read(data / "corrections-eval.jsonl")]
    assert len(set(unseen)) == 64 and seen.isdisjoint(unseen)


def test_half_of_the_first_answers_and_half_of_the_second_ones_are_wrong(made: Path) -> None:
    rows = read(made / "data" / "sft.jsonl")
    answers = []
    for row in rows:
        question, *turns = (message["content"] for message in row["messages"])
        answers.append([int(text) == eval(question) for text in turns[::2]])
        assert turns[1::2] == ["wrong"] * (len(turns) // 2)
    assert all(len(right) == 2 - right[0] for right in answers)
    # 3000 and 1500 draws: the standard deviations of the shares are 0.009 and 0.013
    assert sum(right[0] for right in answers) / len(rows) == pytest.approx(0.5, abs=0.04)
    second = [right[1] for right in answers if not right[0]]
    assert sum(second) / len(second) == pytest.approx(0.5, abs=0.05)


def test_a_correction_asks_about_a_wrong_answer(made: Path) -> None:
    for row in read(made / "data" / "corrections-eval.jsonl"):
        question, first, reply = (message["content"] for message in row["prompt"])
        assert first != row["answer"] == str(eval(question)) and reply == "wrong"


def test_every_turn_is_learned(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    texts = ("12+30", "43", "wrong", "42")
    roles = ("user", "assistant") * 2
    messages = tuple(Message(role=role, content=text) for role, text in zip(roles, texts, strict=True))
    sequence = Renderer(tokenizer).conversation(Conversation(messages, None, "s:1"))
    assert tokenizer.decode(sequence.tokens) == "<bos>12+30=43<eos>wrong=42<eos>"
    assert tokenizer.decode(sequence.tokens[sequence.loss_mask]) == "43<eos>42<eos>"


def test_an_episode_ends_with_a_right_answer_or_the_second_one() -> None:
    def episode(*answers: str) -> list[Observation]:
        check = recipe.Check()
        check.reset("42", prompt=[])
        return [check.respond({"role": "assistant", "content": answer}) for answer in answers]

    wrong = Observation("wrong", False, 0)
    assert episode("42") == [Observation((), True, 1)]
    assert episode("41", "42") == [wrong, Observation((), True, 1)]
    assert episode("41", "042") == [wrong, Observation((), True, 0)]


def test_something_must_be_left_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="held_out: expected 1 to 8099"):
        recipe.prepare(tmp_path, 0, held_out=8100)
