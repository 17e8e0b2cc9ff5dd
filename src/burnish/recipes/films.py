"""One-sentence film reviews, each rated by about fifteen people from -4 (very negative) to 4 (very positive).

The 10,605 snippets and their ratings were published with VADER (Hutto and Gilbert 2014) and are part of the source
distribution of the package vaderSentiment. They do not name their films, so the requests they answer are made up here.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import random
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burnish.errors import UserError
from burnish.judges.questions import score_question
from burnish.recipes import write_rows
from burnish.types import Messages, Trajectory

RESOURCES = "additional_resources/hutto_ICWSM_2014.tar.gz"
SNIPPETS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_anonDataRatings.txt"

WORDINGS = (
    "Write one sentence of a review of {}.",
    "Give me a line from a review of {}.",
    "What would a critic say about {}? One sentence.",
    "In one sentence, review {}.",
    "You have just seen {}. Write a sentence about it.",
    "Write a short comment on {}.",
    "I need a one-line review of {}.",
    "Complete this page of reviews with a sentence about {}.",
    "How was {}? Answer in a sentence, as a critic.",
    "Write a sentence for the film page about {}.",
    "Sum up {} in a sentence.",
    "A newspaper asks you for a sentence on {}.",
)
FILMS = (
    "a film", "a movie", "a thriller", "a comedy", "a drama", "a romantic comedy", "an action film", "a war film",
    "a horror film", "a science fiction film", "a film for children", "a sequel", "a remake", "a biopic",
    "a crime film", "a debut", "a musical", "a low-budget film", "a blockbuster", "a French film",
)  # fmt: skip
UNSEEN_WORDINGS = (
    "Please post your verdict on {}, in a single line.",
    "Tell a friend in one line what you made of {}.",
    "Draft the pull quote for {}.",
    "Your column ends with a remark on {}. What is it?",
    "Describe your evening with {} to the readers, briefly.",
    "State your opinion of {} in at most twenty words.",
    "Leave a note in the guest book of the cinema about {}.",
    "Pick the words that fit {} best and make a sentence of them.",
)
UNSEEN_FILMS = (
    "a western", "a documentary", "an animated feature", "a mystery", "a fantasy epic", "a courtroom story",
    "a sports picture", "a black-and-white classic",
)  # fmt: skip


class Snippet(NamedTuple):
    """A sentence of a review: ``Snippet(3, -0.6, "Effective but too tepid biopic", (-1, 0, -1))``."""

    number: int
    mean: float
    text: str
    ratings: tuple[int, ...]


def prepare(
    folder: Path,
    seed: int,
    *,
    archive: str = "data/vaderSentiment-3.3.2.tar.gz",
    held_out: float = 0.1,
    rows: int | None = None,
    rows_held_out: int | None = None,
    pairs: int = 4000,
    pairs_held_out: int = 500,
    prompts: int = 512,
    gap: float = 1.0,
    soft: bool = False,
    system: str | None = None,
    questions: int = 0,
    principle: str | None = None,
) -> None:
    """Write ``data/*.jsonl`` into a folder; the same seed writes the same bytes.

    No snippet is in both a training file and an evaluation file (``*-eval.jsonl``). The requests in
    ``prompts-eval.jsonl`` use wordings and kinds of film that no training file has. ``pairs-shuffled.jsonl`` and
    ``pairs-eval-shuffled.jsonl`` are controls: the same pairs with labels swapped at random, so that there is nothing
    to learn.

    Args:
        folder: where to write.
        seed: seed of the split and of all random choices.
        archive: the source distribution of vaderSentiment.
        held_out: fraction of the snippets held out from training, in (0, 1).
        rows: maximum number of snippets for fine-tuning; None uses all.
        rows_held_out: maximum number of held-out snippets for measuring perplexity; None uses all.
        pairs: number of pairs of snippets for training the reward model.
        pairs_held_out: number of pairs for evaluating it.
        prompts: number of requests for PPO.
        gap: the mean ratings of the two snippets in a pair differ by more than this.
        soft: add ``p_chosen`` to each pair: the fraction of pairs of raters who would prefer the chosen snippet.
        system: a system message before every request.
        questions: number of training snippets in ``questions.jsonl``, as a judge is asked to grade them, with the grade
            that people gave; 0 writes no file.
        principle: what the judge grades by.

    Raises:
        UserError: if the archive is missing or is a different one, or ``held_out`` or ``gap`` leaves no rows.
    """
    rng = random.Random(seed)
    if not 0 < held_out < 1:
        raise UserError(f"held_out: expected a share between 0 and 1, got {held_out}")
    # Duplicate texts are removed, so that none can be on both sides.
    snippets = list({snippet.text: snippet for snippet in reversed(read_snippets(Path(archive)))}.values())
    rng.shuffle(snippets)
    count = max(1, round(held_out * len(snippets)))
    unseen, seen = snippets[:count], snippets[count:]
    requests = [wording.format(film) for wording, film in itertools.product(WORDINGS, FILMS)]

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        write_rows(folder / "data" / name, [{"system": system} | row for row in rows] if system else rows)

    write("sft.jsonl", [sft_row(rng.choice(requests), snippet) for snippet in seen[:rows]])
    write("sft-eval.jsonl", [sft_row(rng.choice(requests), snippet) for snippet in unseen[:rows_held_out]])
    preferred = preference_rows(rng, requests, seen, pairs, gap, soft)
    write("pairs.jsonl", preferred)
    write("pairs-shuffled.jsonl", [swap_labels(row) if rng.random() < 0.5 else row for row in preferred])
    held = preference_rows(rng, requests, unseen, pairs_held_out, gap, soft)
    write("pairs-eval.jsonl", held)
    write("prompts.jsonl", [{"prompt": rng.choice(requests)} for _ in range(prompts)])
    others = itertools.product(UNSEEN_WORDINGS, UNSEEN_FILMS)
    write("prompts-eval.jsonl", [{"prompt": wording.format(film)} for wording, film in others])
    write("pairs-eval-shuffled.jsonl", [swap_labels(row) if rng.random() < 0.5 else row for row in held])
    if questions:
        graded = (question_row(rng.choice(requests), snippet, system, principle) for snippet in seen[:questions])
        write_rows(folder / "data" / "questions.jsonl", graded)


def vader(trajectories: list[Trajectory]) -> list[float]:
    """Sentiment of each answer by VADER's lexicon and rules, from -1 (negative) to 1 (positive).

    Raises:
        UserError: if the package vaderSentiment is not installed.
    """
    return [analyzer().polarity_scores(t.text)["compound"] for t in trajectories]


@functools.cache
def analyzer() -> Any:
    """VADER, loaded once."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "the judge vader needs the package vaderSentiment: pip install --no-deps vaderSentiment==3.3.2"
        ) from error
    return SentimentIntensityAnalyzer()


# --- the archive ---------------------------------------------------------------------------------------------------


def read_snippets(archive: Path) -> list[Snippet]:
    """Read the snippets from the source distribution of vaderSentiment, without unpacking it.

    Raises:
        UserError: if the file does not exist or is a different archive.
    """
    if not archive.is_file():
        raise UserError(
            f"{archive}: no such file; `make data` fetches it, or: pip download --no-deps "
            "--no-binary vaderSentiment --dest data vaderSentiment==3.3.2"
        )
    try:
        with tarfile.open(archive) as outer:
            inside = next((m for m in outer if m.name.endswith(RESOURCES)), None)
            resources = outer.extractfile(inside) if inside else None
            if resources is None:
                raise UserError(f"{archive}: expected the sources of vaderSentiment 3.3.2, which hold {RESOURCES}")
            with tarfile.open(fileobj=resources) as inner:
                texts, ratings = (_lines(inner, name) for name in (SNIPPETS, RATINGS))
    except (tarfile.TarError, EOFError, KeyError) as error:
        raise UserError(f"{archive}: cannot be read as the sources of vaderSentiment 3.3.2: {error}") from error
    given = {fields[0]: tuple(json.loads(fields[-1])) for fields in ratings}
    return [Snippet(int(number), float(mean), clean(text), given[number]) for number, mean, text in texts]


def _lines(archive: tarfile.TarFile, name: str) -> list[list[str]]:
    file = archive.extractfile(name)
    assert file is not None
    return [line.split("\t") for line in file.read().decode("utf-8").splitlines()]


def clean(text: str) -> str:
    """A snippet as its critic wrote it, with normal quotes, dashes and spaces.

    ``clean("unrelentingly grim    and ''engrossing'' .")`` is ``'unrelentingly grim - and "engrossing".'``
    """
    text = html.unescape(text).replace("''", '"').replace("\u2019", "'").strip()
    text = re.sub(r"\s{3,}", " - ", text)
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" (?=[.,;:!?])", "", text)


# --- rows ----------------------------------------------------------------------------------------------------------


def sft_row(request: str, snippet: Snippet) -> dict[str, Any]:
    """A request with a snippet as its answer."""
    return {"prompt": request, "completion": snippet.text, "snippet": snippet.number}


def preference_rows(
    rng: random.Random, requests: Sequence[str], snippets: Sequence[Snippet], count: int, gap: float, soft: bool
) -> list[dict[str, Any]]:
    """Requests with two snippets each, where the chosen one has the higher mean rating."""
    means = [snippet.mean for snippet in snippets]
    if max(means) - min(means) <= gap:
        raise UserError(f"gap: no two of {len(snippets)} snippets differ by more than {gap} in their mean rating")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        worse, better = sorted(rng.sample(snippets, 2), key=lambda snippet: snippet.mean)
        if better.mean - worse.mean > gap:
            row = {"prompt": rng.choice(requests), "chosen": better.text, "rejected": worse.text}
            row |= {"p_chosen": agreement(better.ratings, worse.ratings)} if soft else {}
            rows.append(row | {"snippets": [better.number, worse.number]})
    return rows


def question_row(request: str, snippet: Snippet, system: str | None, principle: str | None) -> dict[str, str]:
    """A snippet as a judge is asked to grade it, and the grade that people gave."""
    prompt = messages("user", request) if system is None else messages("system", system, "user", request)
    question = score_question(prompt, messages("assistant", snippet.text), principle)
    return {"prompt": question.messages[-1]["content"], "completion": str(grade(snippet.mean))}


def grade(mean: float) -> int:
    """The grade of a mean rating: 1 for -3 and below, 10 for 3 and above, where few means are."""
    return min(10, max(1, round(5.5 + 1.5 * mean)))


def messages(*roles_and_texts: str) -> Messages:
    """Messages from roles and texts in turn: ``messages("user", "Hi", "assistant", "Hello")``."""
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return tuple({"role": role, "content": text} for role, text in pairs)


def agreement(better: Sequence[int], worse: Sequence[int]) -> float:
    """Fraction of all pairs of a rating of each snippet in which the better one's is higher. Ties count half."""
    sides = [(b > w) + 0.5 * (b == w) for b, w in itertools.product(better, worse)]
    return sum(sides) / len(sides)


def swap_labels(row: dict[str, Any]) -> dict[str, Any]:
    """A pair with its labels swapped."""
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"], "snippets": row["snippets"][::-1]}
