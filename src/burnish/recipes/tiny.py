"""Two-digit addition with generated data and a model of 0.18 million random weights.

40 % of the fine-tuning answers are wrong, chosen at random, so a model that fits the data perfectly samples a correct
answer 60 % of the time. PPO with a reward model trained on correct and wrong answers can raise this.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import character_tokenizer, random_llama
from burnish.types import Trajectory

Question = tuple[int, int]

CHARACTERS = "0123456789+="
SUMS = range(20, 199)
WRONG_TENS = 0.2

# A question and its answer read "<bos>12+30=42<eos>"; the equals sign is the generation prompt.
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '=' -}}{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '=' -}}{%- endif -%}"""


def prepare(
    folder: Path,
    seed: int,
    *,
    rows: int = 12000,
    pairs: int = 8000,
    prompts: int = 4096,
    held_out: int = 512,
    corrupted: float = 0.4,
    scored: int = 0,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    No question of an evaluation file is in a training file.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of questions with an answer for fine-tuning.
        pairs: number of questions with a correct and a wrong answer.
        prompts: number of questions for PPO.
        held_out: number of the 8,100 questions that are in no training file.
        corrupted: fraction of wrong answers in the fine-tuning data, in [0, 1].
        scored: number of conversations with a reward, 1 for a correct answer and -1 for a wrong one; 0 writes no file.

    Raises:
        UserError: if nothing would be left to train on.
    """
    rng = random.Random(seed)
    questions = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    if not 0 < held_out < len(questions):
        raise UserError(
            f"held_out: expected 1 to {len(questions) - 1} of the {len(questions)} questions, got {held_out}"
        )
    rng.shuffle(questions)
    unseen, seen = questions[:held_out], questions[held_out:]
    write_rows(folder / "data" / "sft.jsonl", (sft_row(rng, rng.choice(seen), corrupted) for _ in range(rows)))
    write_rows(folder / "data" / "sft-eval.jsonl", (sft_row(rng, question, corrupted) for question in unseen))
    write_rows(folder / "data" / "pairs.jsonl", (preference_row(rng, rng.choice(seen)) for _ in range(pairs)))
    write_rows(folder / "data" / "pairs-eval.jsonl", (preference_row(rng, question) for question in unseen))
    write_rows(folder / "data" / "prompts.jsonl", (prompt_row(rng.choice(seen)) for _ in range(prompts)))
    write_rows(folder / "data" / "prompts-eval.jsonl", map(prompt_row, unseen))
    if scored:
        conversations = (scored_row(rng, rng.choice(seen), corrupted) for _ in range(scored))
        write_rows(folder / "data" / "scored.jsonl", conversations)
    write_model(folder / "model", seed)


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 if an answer is exactly the sum, else 0."""
    return [float(t.text == t.columns["answer"]) for t in trajectories]


def constant(trajectories: list[Trajectory]) -> list[float]:
    """1 for every answer. This is a control: there is nothing to learn from it."""
    return [1.0] * len(trajectories)


def sft_row(rng: random.Random, question: Question, corrupted: float) -> dict[str, str]:
    """A row for fine-tuning, whose answer is wrong with probability ``corrupted``."""
    total = wrong_answer(rng, sum(question)) if rng.random() < corrupted else sum(question)
    return {"prompt": question_text(question), "completion": str(total)}


def preference_row(rng: random.Random, question: Question) -> dict[str, str]:
    """A preference for the correct answer over a wrong one."""
    return {
        "prompt": question_text(question),
        "chosen": str(sum(question)),
        "rejected": str(wrong_answer(rng, sum(question))),
    }


def scored_row(rng: random.Random, question: Question, corrupted: float) -> dict[str, Any]:
    """A conversation with its reward. The answer is wrong with probability ``corrupted``."""
    row = sft_row(rng, question, corrupted)
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    return {"text": turns, "reward": 1 if row["completion"] == str(sum(question)) else -1}


def prompt_row(question: Question) -> dict[str, str]:
    """A prompt with the correct answer in the column ``answer``."""
    return {"prompt": question_text(question), "answer": str(sum(question))}


def question_text(question: Question) -> str:
    """The text of a question: ``12+30``."""
    return f"{question[0]}+{question[1]}"


def wrong_answer(rng: random.Random, total: int) -> int:
    """A wrong answer that is a possible sum. Only its last digit is wrong, or, in 20 % of cases, only its tens."""
    step = 10 if rng.random() < WRONG_TENS else 1
    near = range(total % 10, 200, 10) if step == 10 else range(total - total % 10, total - total % 10 + 10)
    return rng.choice([number for number in near if number in SUMS and number != total and abs(number - total) <= 50])


def prepare_student(folder: Path, seed: int, *, hidden_size: int = 48, intermediate_size: int = 192) -> None:
    """Write a smaller random ``model`` with the same tokenizer, which learns from the larger one.

    Args:
        folder: where to write.
        seed: seed of the weights.
        hidden_size: width of the hidden states.
        intermediate_size: width inside each layer.
    """
    write_model(folder / "model", seed, hidden_size, intermediate_size)


def write_model(folder: Path, seed: int, hidden_size: int = 64, intermediate_size: int = 384) -> None:
    """Write a character-level tokenizer and a Llama of two layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    # With the usual initializer_range of 0.02, the model needs twice as many steps to learn to carry.
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": 2}
    model = random_llama(tokenizer, seed, initializer_range=0.08, **sizes)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
