"""The report of a small made-up run: three stages, of which the numbers are known."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from burnish.training import report
from burnish.training.metrics import Recorder
from burnish.types import UserError

VOID = {"meta", "br", "link", "img", "input", "hr"}
PROMPTS = ["Review: I went in expecting little, and", "Review: The first half hour", "Review: <b>Honestly</b> & truly,"]


def curve(recorder: Recorder, steps: int, terms: dict[str, tuple[float, float]], evals: dict[str, tuple[float, float]]):
    """Lines whose values go from the first number of each pair to the second, with noise."""
    noise = random.Random(0)
    for step in range(steps + 1):
        done = 1 - math.exp(-3 * step / steps)
        if step:
            line = {k: a + (b - a) * done + noise.gauss(0, 0.06 * abs(b - a) + 1e-3) for k, (a, b) in terms.items()}
            line |= {"learning_rate": 1e-4 * (1 - step / steps), "tokens": 4096, "seconds": 0.8, "epoch": step / steps}
            recorder.metrics(step, line)
        if evals and step % (steps // 4) == 0:
            values = {f"eval_{k}": a + (b - a) * done for k, (a, b) in evals.items()}
            for key in [key for key in values if key in ("eval_score", "eval_accuracy", "eval_win_rate")]:
                values |= {f"{key}_low": values[key] - 0.06, f"{key}_high": values[key] + 0.06}
            recorder.metrics(step, values)


def make_run(folder: Path) -> Path:
    """A finished run of sft, reward and ppo."""
    curve(Recorder(folder / "sft"), 120, {"loss": (3.9, 2.6), "grad_norm": (4, 1)},
          {"loss": (3.8, 2.7), "perplexity": (44.7, 14.9)})
    curve(Recorder(folder / "reward"), 60, {"loss": (0.7, 0.4), "accuracy": (0.5, 0.84), "margin": (0, 1.2)},
          {"loss": (0.69, 0.45), "accuracy": (0.5, 0.79), "score_std": (0.1, 1.3)})
    recorder = Recorder(folder / "ppo")
    terms = {"loss": (0.3, 0.1), "score": (-0.2, 1.6), "kl": (0, 6.5), "kl_coef": (0.2, 0.16), "entropy": (3.1, 2.4),
             "value": (1.4, 0.3), "explained_variance": (0.0, 0.7), "length": (24, 31), "clipfrac": (0.0, 0.12)}
    curve(recorder, 600, terms, {"score": (-0.2, 1.5), "win_rate": (0.5, 0.86), "kl": (0.0, 6.1), "length": (24, 24.5)})
    recorder.metrics(601, {"loss": math.nan, "score": 1.6})
    words = "a film that never quite finds its feet , but the cast is warm and the ending earned its tears".split()
    for step, shift in ((0, -0.4), (300, 0.8), (600, 1.5)):
        noise = random.Random(step)
        rows = [
            {"step": step, "kind": "eval", "prompt": PROMPTS[i % 3], "completion": " ".join(noise.choices(words, k=24)),
             "score": round(shift + noise.gauss(0, 0.5), 4), "rewards": {"sentiment": shift, "brevity": 0.1},
             "finish": "stop" if i % 4 else "length", "source": f"prompts.jsonl:{i + 1}"}
            for i in range(9)
        ]
        recorder.samples(rows)
    stages = [
        {"name": "sft", "method": "sft", "state": "done", "seconds": 96.0, "data": {"data/train.jsonl": "ab12" * 16},
         "rows": {"train": {"rows": 1997, "skipped": ["train.jsonl:17: no assistant turn"],
                            "cut": ["train.jsonl:4: 1,300 tokens", "train.jsonl:9: 1,101 tokens"]}},
         "results": {"before": {"loss": 3.8, "perplexity": 44.7}, "after": {"loss": 2.72, "perplexity": 15.18}}},
        {"name": "reward", "method": "reward", "state": "done", "seconds": 48.5, "data": {},
         "results": {"before": {"accuracy": 0.5, "accuracy_low": 0.44, "accuracy_high": 0.56, "loss": 0.69, "score_std": 0.1},
                     "after": {"accuracy": 0.79, "accuracy_low": 0.74, "accuracy_high": 0.83, "loss": 0.45, "score_std": 1.3}}},
        {"name": "ppo", "method": "ppo", "state": "done", "seconds": 700.0, "data": {},
         "results": {"before": {"score": -0.2, "score_low": -0.3, "score_high": -0.1, "kl": 0.0, "length": 24.0,
                                "length_low": 22.0, "length_high": 26.0},
                     "after": {"score": 1.5, "score_low": 1.41, "score_high": 1.59, "kl": 6.1, "length": 24.5,
                               "length_low": 22.4, "length_high": 26.6, "win_rate": 0.86, "win_rate_low": 0.8,
                               "win_rate_high": 0.91}}},
    ]
    manifest = {"name": "films", "state": "done", "versions": {"burnish": "0.1.0", "torch": "2.13.0"},
                "machine": {"processor": "x86_64", "threads": 2, "device": "no GPU"},
                "recipe": {"name": "films", "seed": 0, "stages": [{"name": "sft", "method": {"name": "sft"}}]},
                "stages": stages}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
