"""The game: its rules, and the games that the model learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import get_json_schema

from burnish.errors import UserError
from burnish.recipes import guess as recipe
from burnish.render.renderer import Renderer
from burnish.types import Conversation

SIZES: dict[str, Any] = {"rows": 2000, "prompts": 100, "held_out": 64}
SCHEMA = get_json_schema(recipe.Guess.guess)


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
    for name in ("data/sft.jsonl", "data/prompts.jsonl", "data/prompts-eval.jsonl", "model/model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


@pytest.mark.parametrize("number", recipe.NUMBERS)
def test_halving_the_range_finds_every_number(number: int) -> None:
    low, high, game = 1, 15, recipe.Guess()
    game.reset(number, prompt=[])
    for _ in range(recipe.GUESSES):
        assert game.reward == 0 and not game.done
        middle = (low + high) // 2
        reply = game.guess(middle)
        if game.done:
            break
        low, high = (middle + 1, high) if reply == "higher" else (low, middle - 1)
    assert (game.reward, game.done, reply) == (1, True, "right")


def test_the_player_heeds_the_last_reply_and_loses_half_of_the_games(made: Path) -> None:
    rows = read(made / "data" / "sft.jsonl")
    shorter = 0
    for row in rows:
        _, *turns = row["messages"]
        guesses = [turn["tool_calls"][0]["function"]["arguments"]["number"] for turn in turns[::2]]
        replies = [turn["content"] for turn in turns[1::2]]
        assert len(guesses) == len(replies) + 1 <= recipe.GUESSES
        for guess, reply, following in zip(guesses, replies, guesses[1:], strict=False):
            assert reply == ("higher" if following > guess else "lower") and following != guess
        shorter += len(guesses) < recipe.GUESSES
    # the last guess wins some more; 2000 draws: the standard deviation of the share is 0.01
    assert shorter / len(rows) == pytest.approx(0.34, abs=0.04)


def test_a_game_is_rendered_with_one_call_a_turn_and_its_calls_can_be_read_back(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    renderer = Renderer(tokenizer)
    row = next(row for row in read(made / "data" / "sft.jsonl") if len(row["messages"]) == 4)
    question, call, result, last = row["messages"]
    numbers = [message["tool_calls"][0]["function"]["arguments"]["number"] for message in (call, last)]
    sequence = renderer.conversation(Conversation(tuple(row["messages"]), None, "s:1", (SCHEMA,)))
    turns = [f"<tool>guess({number})</tool><eos>" for number in numbers]
    assert tokenizer.decode(sequence.tokens) == f"<bos>[guess]?={turns[0]}>{result['content']}={turns[1]}"
    assert tokenizer.decode(sequence.tokens[sequence.loss_mask]) == "".join(turns)
    prompt = renderer.prompt((question,), tools=(SCHEMA,))
    parsed = renderer.parse(prompt, sequence.tokens[len(prompt) : len(prompt) + 4], (SCHEMA,))
    assert not parsed.error and parsed.message.get("tool_calls") == call["tool_calls"]


def test_a_fraction_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="halved"):
        recipe.prepare(tmp_path, 0, halved=1.5)
