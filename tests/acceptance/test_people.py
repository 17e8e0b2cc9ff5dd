"""From rankings in a browser to a better model: the recipe `people` with a scripted rater."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, pvariance

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from burnish.config.resolve import model_reference
from burnish.math.statistics import interval_of_mean
from burnish.models.loading import load_reward_model, load_tokenizer
from burnish.models.settings import StageModel
from burnish.rewards.model import ModelReward
from burnish.types import Messages, Trajectory

pytestmark = pytest.mark.acceptance

CHROMIUM = "/usr/bin/chromium"
ARCHIVE = Path("data/vaderSentiment-3.3.2.tar.gz")
PROMPTS, NOISE = 50, 0.1
Record = Callable[[str, object], None]


RULE = """\
def words(trajectories):
    return [len(t.text.split()) for t in trajectories]
"""


def liking(text: str) -> int:
    """The rule of the rater, who likes detailed reviews: the number of words."""
    return len(text.split())


def burnish(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [sys.executable, "-m", "burnish", *command],
        env=environment, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip


@pytest.fixture
def page() -> Iterator[Page]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser: {CHROMIUM} does not exist")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium.new_page()
        chromium.close()


def rank(page: Page, address: str, rng: random.Random) -> None:
    """Rank all prompts by keys, the longest review first. One ranking of ten is random."""
    page.goto(address)
    page.get_by_label("Your name").fill("Ann")
    page.keyboard.press("Enter")
    for number in range(1, PROMPTS + 1):
        expect(page.locator("#title:visible")).to_have_text(f"Task {number}")
        cards = sorted(
            (c.locator("h2").inner_text(), c.locator(".body").inner_text()) for c in page.locator(".card").all()
        )
        likings = [liking(text) for _, text in cards]
        if rng.random() < NOISE:
            rng.shuffle(likings)
        order = sorted(range(len(cards)), key=lambda i: -likings[i])
        for above, i in zip([None, *order], order, strict=False):
            page.keyboard.press(str(i + 1))
            if above is not None and likings[i] == likings[above]:
                page.keyboard.press("t")
        page.keyboard.press("Enter")
    expect(page.locator("#done-title")).to_be_visible()


def test_rankings_in_a_browser_become_a_reward_model_and_a_better_policy(
    tmp_path: Path, page: Page, record_property: Record
) -> None:
    if not ARCHIVE.is_file():
        pytest.skip(f"{ARCHIVE} does not exist: run make data")
    out = tmp_path / "run"
    # The rater's score is logged in PPO, and not used.
    (tmp_path / "rater.py").write_text(RULE, "utf-8")
    scorer = f"{{function: {tmp_path / 'rater.py'}:words, weight: 0, name: words}}"
    reward = f"stages.ppo.reward=[{{model: {{stage: reward}}}}, {scorer}]"
    command = ["run", "people", f"out={out}", reward, f"stages.prepare.with.archive={ARCHIVE.resolve()}"]
    waiting = burnish(*command)
    assert waiting.returncode == 3, waiting.stderr[-2000:]
    label = [sys.executable, "-m", "burnish", "label", str(out / "rank.labels.sqlite"), "--raters", "1"]
    with subprocess.Popen(
        label, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as server:
        assert server.stdout is not None
        try:
            address = next(match[1] for line in server.stdout if (match := re.search(r"rank at (\S+)", line)))
            rank(page, address, random.Random(0))
            assert server.wait(30) == 0  # every task has enough answers
        finally:
            server.kill()
    done = burnish(*command)
    assert done.returncode == 0, done.stderr[-2000:]

    shares = agreement_with_the_rater(out)
    mean = fmean(shares)
    low, high = interval_of_mean(mean, pvariance(shares), len(shares), shares=False)
    record_property("agreement on unseen pairs", f"{mean:.3f} [{low:.3f}, {high:.3f}], {len(shares)} prompts")
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    (results,) = (stage["results"] for stage in manifest["stages"] if stage["name"] == "ppo")
    before, after = results["before"], results["after"]
    least, most = (after[f"eval_reward_words_change_{end}"] for end in ("low", "high"))
    scores = f"{before['eval_reward_words']:.1f} -> {after['eval_reward_words']:.1f}"
    record_property("the rater's score", f"{scores}, change in [{least:+.2f}, {most:+.2f}]")
    assert low > 0.65
    assert least > 0


def agreement_with_the_rater(out: Path) -> list[float]:
    """For each prompt that nobody has ranked, how often the reward model agrees with the rater on pairs of samples."""
    recipe = out.parent / "unseen.yaml"
    recipe.write_text(UNSEEN.format(model=out / "sft", prompts=out / "prepare/data/prompts-eval.jsonl"), "utf-8")
    sampled = burnish("run", str(recipe), f"out={out.parent / 'unseen'}")
    assert sampled.returncode == 0, sampled.stderr[-2000:]
    lines = (out.parent / "unseen/samples/data/ranked.jsonl").read_text("utf-8").splitlines()
    reference = model_reference(StageModel(stage="reward"), out)
    tokenizer = load_tokenizer(reference)
    scorer = ModelReward(load_reward_model(reference, labels=None), tokenizer)
    rng, agreed = random.Random(1), []
    for row in map(json.loads, lines):
        prompt: Messages = (
            {"role": "system", "content": "You review films."},
            {"role": "user", "content": row["prompt"]},
        )
        texts = row["completions"]
        scores = scorer([Trajectory.from_text(text, prompt) for text in texts])
        mine = []
        for i, j in itertools.combinations(range(len(texts)), 2):
            wanted = liking(texts[i]) - liking(texts[j])
            if wanted:
                wanted *= -1 if rng.random() < NOISE / 2 else 1  # a random ranking has half of the pairs right
                mine.append(float((scores[i] > scores[j]) == (wanted > 0)))
        if mine:
            agreed.append(fmean(mine))
    return agreed


UNSEEN = """\
name: unseen
stages:
  - name: samples
    method: {{name: sample}}
    model: {model}
    generation: {{samples: 8, max_new_tokens: 24}}
    data: {{rows: {prompts}}}
"""
