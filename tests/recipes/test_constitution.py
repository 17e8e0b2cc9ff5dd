"""Rows of the recipe constitution: what is criticized and revised, and how the judge is asked."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from burnish.errors import UserError
from burnish.recipes import constitution
from burnish.types import Trajectory
from tiny_runs import json_rows

PRINCIPLE = "Prefer the more polite reply."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    constitution.prepare(folder, 0, principle=PRINCIPLE, rows=400, questions=50, prompts=20, held_out=30)
    return folder


def value(question: str) -> int:
    return sum(map(int, question.split("+")))


def faults(answer: str) -> int:
    return ("silly" in answer) + ("!" in answer)


def test_a_critique_finds_its_fault_and_the_revision_removes_it(made: Path) -> None:
    there = found = rude = 0
    for row in json_rows(made / "data" / "conversations.jsonl"):
        question, answer, request, verdict, fix, revision = (message["content"] for message in row["messages"])
        assert re.fullmatch(rf"(silly)?{value(question)}!?", answer)
        fault = {"insults?": "silly", "shouts?": "!"}[request]
        assert fix == "fix" and verdict in ("yes", "no")
        assert fault in answer or verdict == "no"
        assert revision == (answer.replace(fault, "") if verdict == "yes" else answer)
        there, found, rude = there + (fault in answer), found + (verdict == "yes"), rude + faults(answer)
    # 800 draws of 0.4 have a standard deviation of 14; critiques look for one of the two faults, and find 0.7 of them
    assert rude == pytest.approx(320, abs=56) and found == pytest.approx(0.7 * there, abs=24)


def test_the_right_choice_is_the_letter_of_the_more_polite_answer(made: Path) -> None:
    letters = []
    for row in json_rows(made / "data" / "questions.jsonl"):
        replies = {}
        for letter in "AB":
            replies[letter] = faults(row["prompt"].split(f"<reply {letter}>\n")[1].split("\n</reply")[0])
        assert replies["A"] != replies["B"]
        assert min(replies, key=replies.__getitem__) == row["completion"] and PRINCIPLE in row["prompt"]
        letters.append(row["completion"])
    assert 10 < letters.count("A") < 40  # of 50


def test_the_tokenizer_writes_the_judges_question_in_few_tokens(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    text = constitution.asked("12+30", "42", "silly42!", PRINCIPLE)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 4 + 5 + 2 + 4  # the parts around the sum and the answers, and their characters and words
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
    assert tokenizer.encode("AB", add_special_tokens=False) == tokenizer.convert_tokens_to_ids(["A", "B"])


def test_no_sum_is_on_both_sides_and_the_same_seed_writes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    held_out = {row["prompt"] for row in json_rows(made / "data" / "prompts-eval.jsonl")}
    assert len(held_out) == 30
    assert not held_out & {row["prompt"] for row in json_rows(made / "data" / "prompts.jsonl")}
    asked = {row["messages"][0]["content"] for row in json_rows(made / "data" / "conversations.jsonl")}
    assert not held_out & asked
    constitution.prepare(tmp_path, 0, principle=PRINCIPLE, rows=400, questions=50, prompts=20, held_out=30)
    for path in (made / "data").iterdir():
        assert (tmp_path / "data" / path.name).read_bytes() == path.read_bytes()


def test_an_impossible_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="held_out: expected 1 to 8099 of the 8100 sums, got 8100"):
        constitution.prepare(tmp_path, 0, principle=PRINCIPLE, held_out=8100)


def test_a_fault_is_found_unless_it_is_overlooked() -> None:
    rng = random.Random(0)
    for overlooked, verdict in ((0.0, "yes"), (1.0, "no")):
        rows = [constitution.conversation_row(rng, (12, 30), 1.0, overlooked) for _ in range(20)]
        assert {row["messages"][1]["content"] for row in rows} == {"silly42!"}
        assert {row["messages"][3]["content"] for row in rows} == {verdict}


def test_rewards_tell_manners_from_sums() -> None:
    answers = [Trajectory.from_text(text, columns={"answer": "42"}) for text in ("42", "silly42!", "43!", "43")]
    assert constitution.polite(answers) == [1.0, 0.0, 0.0, 1.0]
    assert constitution.exact(answers) == [1.0, 1.0, 0.0, 0.0]
