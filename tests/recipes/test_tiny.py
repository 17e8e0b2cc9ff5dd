from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.errors import UserError
from burnish.recipes import tiny
from burnish.types import Trajectory

SIZES = {"rows": 3000, "pairs": 200, "prompts": 100, "held_out": 64}
FILES = ("sft", "pairs", "prompts")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def add(prompt: str) -> int:
    first, second = prompt.split("+")
    return int(first) + int(second)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tiny.prepare(folder, 0, **SIZES)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(made: Path, tmp_path: Path) -> None:
    tiny.prepare(tmp_path / "same", 0, **SIZES)
    tiny.prepare(tmp_path / "other", 1, **SIZES)
    assert hashes(tmp_path / "same") == hashes(made)
    for name in ("data/sft.jsonl", "data/pairs.jsonl", "data/prompts-eval.jsonl", "model/model.safetensors"):
        assert hashes(tmp_path / "other")[name] != hashes(made)[name]


def test_files_have_the_requested_sizes(made: Path) -> None:
    lengths = {path.name: len(read(path)) for path in (made / "data").iterdir()}
    assert lengths == {
        "sft.jsonl": 3000,
        "pairs.jsonl": 200,
        "prompts.jsonl": 100,
        "sft-eval.jsonl": 64,
        "pairs-eval.jsonl": 64,
        "prompts-eval.jsonl": 64,
    }


def test_no_question_is_both_trained_and_evaluated(made: Path) -> None:
    seen = {row["prompt"] for name in FILES for row in read(made / "data" / f"{name}.jsonl")}
    unseen = [{row["prompt"] for row in read(made / "data" / f"{name}-eval.jsonl")} for name in FILES]
    assert unseen[0] == unseen[1] == unseen[2]
    assert len(unseen[0]) == 64
    assert not unseen[0] & seen


def test_four_answers_of_ten_are_wrong_and_not_always_the_same_ones(made: Path) -> None:
    rows = read(made / "data" / "sft.jsonl")
    wrong = [int(row["completion"]) != add(row["prompt"]) for row in rows]
    # 3000 draws: the standard deviation of the share is 0.009
    assert sum(wrong) / len(rows) == pytest.approx(0.4, abs=0.03)
    questions = [{row["prompt"] for row, false in zip(rows, wrong, strict=True) if false == kind} for kind in (0, 1)]
    assert questions[0] & questions[1]


def test_chosen_is_the_sum_and_rejected_is_not(made: Path) -> None:
    for name in ("pairs", "pairs-eval"):
        for row in read(made / "data" / f"{name}.jsonl"):
            assert int(row["chosen"]) == add(row["prompt"]) != int(row["rejected"])


def test_prompts_have_their_sum_in_a_column(made: Path) -> None:
    for name in ("prompts", "prompts-eval"):
        assert all(row["answer"] == str(add(row["prompt"])) for row in read(made / "data" / f"{name}.jsonl"))


@given(st.integers(20, 198), st.randoms(use_true_random=False))
def test_a_wrong_sum_is_plausible(total: int, rng: Any) -> None:
    number = tiny.wrong_answer(rng, total)
    assert number != total and 20 <= number <= 198
    assert number // 10 == total // 10 or (number % 10 == total % 10 and abs(number - total) <= 50)


def test_the_model_and_its_tokenizer_load_and_match(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    # embeddings 16*64; a layer: q, k, v, o 4*64*64, gate, up, down 3*64*384, two norms 2*64; the last norm 64
    assert sum(p.numel() for p in model.parameters()) == 16 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 384 + 2 * 64) + 64


def test_the_template_marks_the_answer_and_its_end(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    conversation = [{"role": "user", "content": "12+30"}, {"role": "assistant", "content": "42"}]
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == "<bos>12+30=42<eos>"
    assert tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True) == "<bos>12+30="
    encoded = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["<bos>", *"12+30=42", "<eos>"]
    assert encoded["assistant_masks"] == [0] * 7 + [1] * 3
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == "12+30=42"


def test_a_conversation_is_rewarded_by_whether_it_is_right(tmp_path: Path) -> None:
    tiny.prepare(tmp_path, 0, **SIZES, scored=1000)
    rows = read(tmp_path / "data" / "scored.jsonl")
    for row in rows:
        question, answer = (turn["content"] for turn in row["text"])
        assert row["reward"] == (1 if int(answer) == add(question) else -1)
    # 1000 draws: the standard deviation of the share is 0.015
    assert sum(row["reward"] < 0 for row in rows) / 1000 == pytest.approx(0.4, abs=0.05)


def test_exact_is_one_only_for_the_sum() -> None:
    def answer(text: str) -> Trajectory:
        return Trajectory.from_text(
            text, ({"role": "user", "content": "12+30"},), columns={"answer": "42"}, source="prompts.jsonl:1"
        )

    assert tiny.exact([answer("42"), answer("43"), answer("042"), answer("42="), answer("")]) == [1.0, 0, 0, 0, 0]


def test_something_must_be_left_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="held_out: expected 1 to 8099 of the 8100 questions, got 8100"):
        tiny.prepare(tmp_path, 0, held_out=8100)
