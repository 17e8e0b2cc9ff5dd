"""Rows of the recipe constitution: what is criticized and revised, and how the judge is asked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from burnish.errors import UserError
from burnish.recipes import constitution
from tiny_runs import json_rows

PRINCIPLE = "Prefer the correct sum."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    constitution.prepare(folder, 0, principle=PRINCIPLE, rows=400, questions=50, prompts=20, held_out=30)
    return folder


def value(question: str) -> int:
    return sum(map(int, question.split("+")))


def test_a_critique_concerns_its_digit_and_a_revision_follows_it(made: Path) -> None:
    mistakes = found = wrong = 0
    for row in json_rows(made / "data" / "conversations.jsonl"):
        question, answer, request, verdict, fix, revision = (message["content"] for message in row["messages"])
        total = f"{value(question):03d}"
        digits = slice(2, 3) if request == "ones?" else slice(0, 2)
        mistake = f"{int(answer):03d}"[digits] != total[digits]
        assert fix == "fix" and verdict in ("right", "wrong") and request in ("ones?", "tens?")
        assert mistake or verdict == "right"  # nothing right is called wrong
        assert revision == (str(value(question)) if verdict == "wrong" else answer)
        mistakes, found, wrong = mistakes + mistake, found + (verdict == "wrong"), wrong + (answer != str(int(total)))
    # 400 draws of 0.4 have a standard deviation of 10; half of 160 mistakes are asked about, 0.7 of which are found
    assert wrong == pytest.approx(160, abs=40) and found == pytest.approx(0.7 * mistakes, abs=16)


def test_the_right_choice_is_the_letter_of_the_correct_answer(made: Path) -> None:
    letters = []
    for row in json_rows(made / "data" / "questions.jsonl"):
        replies = {}
        for letter in "AB":
            replies[letter] = row["prompt"].split(f"<reply {letter}>\n")[1].split("\n</reply")[0]
        question = row["prompt"].split("<conversation>\n")[1].split("\n")[0]
        assert [letter for letter, reply in replies.items() if int(reply) == value(question)] == [row["completion"]]
        assert PRINCIPLE in row["prompt"]
        letters.append(row["completion"])
    assert 10 < letters.count("A") < 40  # of 50


def test_the_tokenizer_writes_the_judges_question_in_few_tokens(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    text = constitution.asked("12+30", "42", "43", PRINCIPLE)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 4 + 5 + 2 + 2  # the parts around the sum and the answers, and their characters
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


def test_a_wrong_digit_is_found_unless_it_is_overlooked() -> None:
    rng = random.Random(0)
    for overlooked, verdicts in ((0.0, {"wrong", "right"}), (1.0, {"right"})):
        rows = [constitution.conversation_row(rng, (12, 30), 1.0, overlooked) for _ in range(50)]
        assert {row["messages"][3]["content"] for row in rows} == verdicts
