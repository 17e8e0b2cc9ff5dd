"""What both sides of a benchmark read: a random model, its tokenizer, and rows of random words, made from a seed.

``python benchmarks/workload.py FOLDER --vocabulary 4096``. Lengths are log-normal, clipped to 16 and 512 tokens, with
about half of a row in its prompt. The model's end token has a probability of about ``STOP`` a step, so that completions
of at most ``LONGEST`` tokens have a third of that length on average.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

SEED = 7
MEDIAN, SIGMA, SHORTEST, LONGEST_ROW = 120, 0.8, 16, 512
LONGEST, STOP = 128, 2.82 / 128  # (1 - exp(-x)) / x is 1 / 3 at x = 2.82
BODY = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 832, "num_attention_heads": 4}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<assistant>' -}}{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- '<user>' + message['content'] -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""
AROUND_PROMPT, AROUND_ANSWER = 3, 1  # tokens of the template: <bos> <user> ... <assistant>, and <eos>


def tokenizer(vocabulary: int) -> Any:
    """Every id is a word, and every word one id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
        model_max_length=1024,
    )


def save_models(folder: Path, vocabulary: int) -> None:
    """``model``, and ``reward``: a sequence classifier of the same shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    shape: dict[str, Any] = {
        **BODY,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(SEED)
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, **ids))
    with torch.no_grad():
        # One direction that all hidden states share lets the head give the end token about the same logit everywhere.
        model.model.embed_tokens.weight[:, 0] = 1.0
        trial = torch.randint(len(SPECIAL), vocabulary, (8, 128))
        hidden = model.model(trial).last_hidden_state.flatten(0, 1)
        model.lm_head.weight[:, 0] = 0.0
        others = model.lm_head(hidden).logsumexp(-1).mean()
        model.lm_head.weight[2] = 0.0
        model.lm_head.weight[2, 0] = (others + math.log(STOP / (1 - STOP))) / hidden[:, 0].mean()
    names: dict[str, Any] = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    reward = LlamaForSequenceClassification(LlamaConfig(**shape, **ids, **names))
    words = tokenizer(vocabulary)
    for name, made in {"model": model, "reward": reward}.items():
        made.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


def turns(role: str, words: list[int]) -> list[dict[str, str]]:
    """A conversation of one turn."""
    return [{"role": role, "content": " ".join(f"w{i}" for i in words)}]


def rows(method: str, count: int, vocabulary: int, length: int | None = None) -> list[dict[str, Any]]:
    """Rows of a method as both libraries read them, all of ``length`` tokens where it is given.

    ``tokens`` are the ids' numbers by part, with the template's: {"prompt": 60, "answers": [55, 71]}.
    """
    r = random.Random(f"{SEED}/{length}")

    def words(n: int) -> list[int]:
        return [r.randrange(len(SPECIAL), vocabulary) for _ in range(max(n, 1))]

    made = []
    for _ in range(count):
        drawn = round(math.exp(r.gauss(math.log(MEDIAN), SIGMA)))
        total = length or min(max(drawn, SHORTEST), LONGEST_ROW)
        before = round(total * (0.5 if length else r.uniform(0.4, 0.6)))
        after = [total - before]
        if method in ("dpo", "reward"):
            after.append(min(max(round(after[0] * math.exp(r.gauss(0, 0.3))), 4), LONGEST_ROW - before))
        row: dict[str, Any] = {"prompt": turns("user", words(before - AROUND_PROMPT))}
        answers = [turns("assistant", words(n - AROUND_ANSWER)) for n in after]
        if method == "sft":
            row["completion"] = answers[0]
        elif method in ("dpo", "reward"):
            row["chosen"], row["rejected"] = answers
        made.append({"row": row, "tokens": {"prompt": before, "answers": after}})
    return made


def given(prompts: int, samples: int, vocabulary: int, whole: bool) -> list[list[list[int]]]:
    """Completions of each prompt for the comparison of the first step; ``whole``: all end at the last token."""
    r = random.Random(f"{SEED}/given")

    def completion() -> list[int]:
        n = LONGEST if whole else min(1 + int(r.expovariate(STOP)), LONGEST)
        return [*(r.randrange(len(SPECIAL), vocabulary) for _ in range(n - 1)), 2]

    return [[completion() for _ in range(samples)] for _ in range(prompts)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocabulary", type=int, default=4096)
    options = parser.parse_args()
    save_models(options.folder, options.vocabulary)
    print(json.dumps({"model": str(options.folder)}))
