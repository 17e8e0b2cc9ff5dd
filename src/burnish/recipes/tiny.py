"""Two-digit addition, with all of its data and a model of 0.18 million random weights made on the spot.

Four answers of ten that the model is fine-tuned on are wrong, drawn anew for every row, so there is nothing else to
learn: a model that fits the data perfectly samples a right answer six times of ten. A reward model that has seen
right and wrong answers, and PPO against it, can lift it above that.
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
        seed: of the data and of the weights.
        rows: questions with an answer to fine-tune on.
        pairs: questions with a right and a wrong answer.
        prompts: questions to be answered in PPO.
        held_out: questions that no training file has; of the 8,100 there are.
        corrupted: share of wrong answers among the answers to fine-tune on, in [0, 1].
        scored: conversations with a reward, 1 for a right answer and -1 for a wrong one; 0 writes no such file.

    Raises:
        UserError: nothing would be left to train on.
    """
    rng = random.Random(seed)
    questions = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    if not 0 < held_out < len(questions):
        raise UserError(
            f"held_out: expected 1 to {len(questions) - 1} of the {len(questions)} questions, got {held_out}"
        )
    rng.shuffle(questions)
    unseen, seen = questions[:held_out], questions[held_out:]
    write_rows(folder / "data" / "sft.jsonl", (answered(rng, rng.choice(seen), corrupted) for _ in range(rows)))
    write_rows(folder / "data" / "sft-eval.jsonl", (answered(rng, question, corrupted) for question in unseen))
    write_rows(folder / "data" / "pairs.jsonl", (pair(rng, rng.choice(seen)) for _ in range(pairs)))
    write_rows(folder / "data" / "pairs-eval.jsonl", (pair(rng, question) for question in unseen))
    write_rows(folder / "data" / "prompts.jsonl", (asked(rng.choice(seen)) for _ in range(prompts)))
    write_rows(folder / "data" / "prompts-eval.jsonl", map(asked, unseen))
    if scored:
        conversations = (rated(rng, rng.choice(seen), corrupted) for _ in range(scored))
        write_rows(folder / "data" / "scored.jsonl", conversations)
    write_model(folder / "model", seed)


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 where an answer is the sum and nothing else, and 0 elsewhere."""
    return [float(t.text == t.columns["answer"]) for t in trajectories]


def constant(trajectories: list[Trajectory]) -> list[float]:
    """1 for every answer: a control, from which nothing can be learned."""
    return [1.0] * len(trajectories)


def answered(rng: random.Random, question: Question, corrupted: float) -> dict[str, str]:
    """A row to fine-tune on, its answer wrong with probability ``corrupted``."""
    total = wrong(rng, sum(question)) if rng.random() < corrupted else sum(question)
    return {"prompt": spell(question), "completion": str(total)}


def pair(rng: random.Random, question: Question) -> dict[str, str]:
    """A preference for the right answer."""
    return {"prompt": spell(question), "chosen": str(sum(question)), "rejected": str(wrong(rng, sum(question)))}


def rated(rng: random.Random, question: Question, corrupted: float) -> dict[str, Any]:
    """A conversation with its reward, its answer wrong with probability ``corrupted``."""
    row = answered(rng, question, corrupted)
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    return {"text": turns, "reward": 1 if row["completion"] == str(sum(question)) else -1}


def asked(question: Question) -> dict[str, str]:
    """A prompt with the right answer in a column of its own."""
    return {"prompt": spell(question), "answer": str(sum(question))}


def spell(question: Question) -> str:
    """``12+30``."""
    return f"{question[0]}+{question[1]}"


def wrong(rng: random.Random, total: int) -> int:
    """Another sum of two two-digit numbers that differs in its last digit, or in one case of five in its tens."""
    step = 10 if rng.random() < WRONG_TENS else 1
    near = range(total % 10, 200, 10) if step == 10 else range(total - total % 10, total - total % 10 + 10)
    return rng.choice([number for number in near if number in SUMS and number != total and abs(number - total) <= 50])


def write_model(folder: Path, seed: int) -> None:
    """A tokenizer of one token for each character, and a Llama of two layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    # With the usual initializer_range of 0.02 it takes twice as many steps to learn the first carry.
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=384, num_hidden_layers=2, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
