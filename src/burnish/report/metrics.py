"""The recorded files of a run (metrics.jsonl, samples.jsonl), and the name and meaning of each metric."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from burnish import files
from burnish.errors import UserError

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# --- the files ----------------------------------------------------------------------------------------------------


class Recorder:
    """Appends to metrics.jsonl and samples.jsonl of a stage's folder; ``Recorder(Path("runs/my-run/sft"))``.

    What is written depends only on the arguments, never on the clock, so a resumed run ends with the same bytes as an
    uninterrupted one, except for timings. Numbers are written with the fewest digits that read back as the same
    float. JSON has no numbers for NaN and infinities: they are written as the strings "NaN", "Infinity" and
    "-Infinity", which ``float()`` and `read_metrics` understand.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line: ``{"step": 3, "loss": 1.25, ...}``, keys in the order of ``values``."""
        self._append(METRICS_FILE, [{"step": step, **values}])

    def samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per row: ``{"step": 0, "kind": "eval", "prompt": "Hi", "completion": "Hello", ...}``."""
        self._append(SAMPLES_FILE, rows)

    def offsets(self) -> dict[str, int]:
        """The size of each file, flushed to disk. A checkpoint keeps it, and `truncate` goes back to it."""
        sizes = {}
        for name in (METRICS_FILE, SAMPLES_FILE):
            path = self.folder / name
            with files.storing(path), path.open("ab") as file:
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        return sizes

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Remove what was written after `offsets` was called; ``{}`` removes everything.

        Raises:
            UserError: if a file is shorter than its offset, or a line before it is damaged.
        """
        for name in (METRICS_FILE, SAMPLES_FILE):
            path, size = self.folder / name, offsets.get(name, 0)
            read_lines(path, size)
            with files.storing(path), path.open("ab") as file:
                if file.tell() < size:
                    raise UserError(
                        f"{path}: {file.tell()} bytes, but the checkpoint was saved when it had {size}; "
                        "restore the file, or start over with --fresh"
                    )
                file.truncate(size)

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with files.storing(self.folder / name), (self.folder / name).open("ab") as file:
            # A lone surrogate cannot be UTF-8; backslashreplace turns it into its JSON escape.
            file.write(lines.encode("utf-8", "backslashreplace"))


def read_lines(path: Path, size: int | None = None) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be growing, or of its first ``size`` bytes; [] if there is no file.

    Raises:
        UserError: if a line is damaged. The message names it.
    """
    if not path.exists():
        return []
    *complete, rest = path.read_bytes()[:size].split(b"\n")
    if size and rest:
        complete.append(rest)  # these bytes ended with a line when they were written
    lines = []
    for number, line in enumerate(complete, start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("step", 0), int):
            raise UserError(
                f"{path}:{number}: this line is damaged: expected a JSON object, got "
                f"{line[:60].decode('utf-8', 'backslashreplace')!r}: restore the file, or remove the line"
            )
        lines.append(values)
    return lines


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a stage's metrics.jsonl, with NaN and infinities as floats.

    Raises:
        UserError: if a line is damaged.
    """
    return [from_json(line) for line in read_lines(folder / METRICS_FILE)]


def is_timing(key: str) -> bool:
    """Whether a metric measures time (seconds, tokens_per_second, ...). Two equal runs may differ in it."""
    return key.endswith(("seconds", "per_second"))


def to_json(value: Any) -> Any:
    """A value that JSON can represent: numbers from 0-d tensors and numpy, and strings for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(value: Any) -> Any:
    """A value with the strings that `to_json` writes for NaN and infinities as floats again."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


# --- what a metric is called and means ----------------------------------------------------------------------------


class Metric(NamedTuple):
    """A metric for readers: ``Metric("Accuracy", "pairs ranked as labeled", better="higher", share=True)``.

    ``better`` is the direction of improvement, None if there is none; a ``share`` is shown as a percentage;
    ``headline`` metrics are shown in the terminal and first in the report; ``start`` is the value before training, if
    it is known by definition; ``short`` is the name in a line of text, if that is not the key.
    """

    label: str
    meaning: str = ""
    better: Literal["lower", "higher"] | None = None
    share: bool = False
    headline: bool = False
    start: float | None = None
    short: str = ""


# In the order in which they are shown.
METRICS: dict[str, Metric] = {
    "score": Metric("Score", "mean reward of a completion, before any KL penalty", "higher", headline=True),
    "win_rate": Metric(
        "Win rate",
        "completions that score higher than those before training, or of the other model",
        "higher",
        True,
        True,
        start=0.5,
    ),
    "accuracy": Metric("Accuracy", "pairs in which the preferred answer scores higher", "higher", True, True),
    "solved": Metric("Solved", "questions with a correct solution", "higher", True, True),
    "sign_accuracy": Metric(
        "Sign accuracy", "solutions whose last value has the sign of their outcome", "higher", True, True
    ),
    "loss": Metric("Loss", "what training minimizes", "lower", headline=True),
    "perplexity": Metric("Perplexity", "exp(loss per token); 1 is best", "lower", False, True),
    "nll": Metric("Negative log-likelihood", "nats per token", "lower"),
    "logprob_positive_advantage": Metric(
        "Log-probability, positive advantage", "mean over tokens with a positive advantage, in nats", "higher"
    ),
    "logprob_negative_advantage": Metric(
        "Log-probability, negative advantage", "mean over tokens with a negative advantage, in nats; unbounded below"
    ),
    "kl_loss": Metric("KL to the reference model, in the loss", "reduced as the policy loss is", "lower"),
    "reverse_kl": Metric(
        "KL(student || teacher)", "nats per token: how likely the teacher finds the student", "lower", headline=True
    ),
    "forward_kl": Metric(
        "KL(teacher || student)", "nats per token: how likely the student finds the teacher", "lower", headline=True
    ),
    "divergence": Metric("Divergence from the teacher", "nats per token, as the method sets it", "lower"),
    "preference": Metric("Preference loss", "-log sigmoid(margin) per pair", "lower"),
    "margin": Metric("Margin", "score of the preferred answer minus that of the other", "higher", headline=True),
    "kl": Metric("KL to the reference model", "nats per completion; how far the policy has moved", headline=True),
    "log_ratio": Metric(
        "Log-ratio to the reference model", "nats per completion, which top-k, top-p or greedy decoding sampled"
    ),
    "kl_coef": Metric("KL coefficient", "price of one nat of KL, in units of score"),
    "rlhf_reward": Metric("Score minus KL penalty", "score - coefficient * KL: what PPO maximizes", "higher"),
    "entropy": Metric("Entropy", "nats per token; near 0 the policy repeats itself", headline=True),
    "value": Metric(
        "Value loss",
        "squared error of the critic, or of the values of reasoning steps",
        "lower",
        headline=True,
        short="value loss",
    ),
    "value_correct": Metric("Value error, correct", "squared, over the reasoning steps of correct solutions", "lower"),
    "value_incorrect": Metric(
        "Value error, incorrect", "squared, over the reasoning steps of incorrect solutions", "lower"
    ),
    "value_first": Metric(
        "Value error, first third", "squared, over reasoning steps in the first third of a solution", "lower"
    ),
    "value_middle": Metric("Value error, middle third", "squared, over reasoning steps in the middle third", "lower"),
    "value_last": Metric(
        "Value error, last third", "squared, over reasoning steps in the last third, including the last", "lower"
    ),
    "value_error": Metric(
        "Value error",
        "mean (V - outcome)² at the ends of a question's solutions; 1 if V is always 0",
        "lower",
        headline=True,
    ),
    "explained_variance": Metric(
        "Explained variance",
        "share of the variance of returns that the critic predicts; 0 is no better than a constant",
        "higher",
        False,
        True,
    ),
    "solutions": Metric("Solutions", "rows written per question, at most the correct and incorrect ones asked for"),
    "nodes": Metric("Nodes", "reasoning steps in the trees of a question, with the question itself"),
    "depth": Metric("Depth", "reasoning steps of the longest solution of a question"),
    "sampled_tokens": Metric("Sampled tokens", "per question"),
    "length": Metric("Completion length", "tokens", headline=True),
    "turns": Metric("Turns", "messages of the policy in an episode", headline=True),
    "tool_calls": Metric("Tool calls", "per episode", headline=True),
    "tool_errors": Metric("Tool errors", "per episode: calls that could not be read or failed", "lower", headline=True),
    "stopped": Metric(
        "Stopped", "completions that ended with a stop token, or that their environment ended", None, True
    ),
    "empty": Metric("Empty", "completions without text, or with an empty message", "lower", True),
    "ranked": Metric(
        "Ranked", "prompts whose completions have different scores, or that people have ranked", share=True
    ),
    "raters": Metric("Raters", "per prompt that is ranked"),
    "rater_seconds": Metric("Seconds of a rater", "for each prompt"),
    "rater_agreement": Metric(
        "Agreement of raters", "Krippendorff's alpha of ranks; 1 is perfect and 0 is chance", "higher", headline=True
    ),
    "disagreement": Metric("Disagreement", "of the rewards about the completions of a prompt, in nats"),
    "changed": Metric(
        "Changed", "answers that differ from the first answer after all revisions", share=True, headline=True
    ),
    "revisions": Metric("Revisions", "made per answer", headline=True),
    "agreement": Metric("Agreement", "pairs in which the judge agrees with the labels", "higher", True, True),
    "kappa": Metric("Cohen's kappa", "agreement with the labels beyond chance; 1 is perfect", "higher", headline=True),
    "position_bias": Metric(
        "Position bias", "pairs in which the judge's choice changes with their order", "lower", True, True
    ),
    "mass_lost": Metric("Mass lost", "probability of answers that name no choice", "lower", True, True),
    "calls": Metric("Calls", "of the judge, in all"),
    "cached": Metric("Cached", "questions that the judge had answered before, in all"),
    "judge_tokens": Metric("Tokens of the judge", "read and written, in all"),
    "cost": Metric("Cost", "of the judge, in all", "lower"),
    "judge_seconds": Metric("Seconds of the judge", "for each pair or completion"),
    "failed": Metric("Failed", "pairs or completions without a verdict", "lower", True),
    "passed": Metric("Passed", "rows for which the function returned True", None, True, True),
    "chosen": Metric("Score of preferred answers", "mean"),
    "rejected": Metric("Score of other answers", "mean"),
    "score_mean": Metric("Mean score", "over all answers; only differences between scores have a meaning"),
    "score_std": Metric("Spread of scores", "standard deviation over completions"),
    "squares": Metric("Squared score", "mean over answers"),
    "logprob_chosen": Metric(
        "Log-probability of preferred answers", "mean per answer, in nats; should not keep falling"
    ),
    "logprob_rejected": Metric("Log-probability of other answers", "mean per answer, in nats"),
    "chosen_falling": Metric(
        "Preferred answers falling", "optimizer steps in a row in which their reward fell", "lower"
    ),
    "kto": Metric("KTO loss", "per answer", "lower"),
    "baseline": Metric("KTO baseline", "mean log-ratio of answers to other prompts, at least 0"),
    "centering": Metric("Centering loss", "squared sum of a pair's scores"),
    "zero_advantage_fraction": Metric(
        "Zero advantage", "completions that teach nothing because their advantage is 0", "lower", True
    ),
    "score_drawn": Metric("Score before replacing", "mean over the completions of all prompts, replaced ones included"),
    "replaced_prompts": Metric("Replaced prompts", "per batch, because their completions all had the same score"),
    "overlong": Metric("Length penalty", "mean over completions"),
    "correction_touched": Metric("Corrected tokens", "tokens whose loss is weighted down or masked", None, True),
    "staleness": Metric("Staleness", "updates between the weights that sampled a batch and those that learn from it"),
    "effective_sample_size": Metric("Effective sample size", "of the correction, as a share of tokens", None, True),
    "ties": Metric("Ties", "comparisons in which both scores are equal", None, True),
    "policy": Metric("Policy loss", "as the policy loss and its reduction define it"),
    "approxkl": Metric("KL of the update", "nats per token, to the policy that sampled"),
    "clipfrac": Metric("Policy clip fraction", "tokens whose ratio left the trust region", None, True),
    "value_clipfrac": Metric("Value clip fraction", "tokens whose value left the trust region", None, True),
    "ratio": Metric("Probability ratio", "new over old probability, mean; 1 is no change"),
    "values": Metric("Values", "mean prediction of the critic per token"),
    "returns": Metric("Returns", "mean of what the critic should predict, per token"),
    "sampler_mismatch": Metric(
        "Sampler mismatch", "difference of sampler and trainer log-probabilities; 0 if they agree"
    ),
    "non_finite_steps": Metric(
        "Skipped optimizer steps", "so far, because their loss or gradient was not finite", "lower"
    ),
    "stopped_fraction": Metric("Steps left out", "of all optimizer steps, because of target_kl", "lower", share=True),
    "environment_tokens": Metric("Tokens of environments", "per episode: what was not sampled after its prompt"),
    "computed_tokens": Metric("Computed tokens", "per episode: those that the sampler did not know from earlier turns"),
    "sequences": Metric("Sequences", "per episode; more than 1 if the chat template rewrites earlier turns"),
    "learning_rate": Metric("Learning rate", "", headline=True),
    "grad_norm": Metric("Gradient norm", "before clipping"),
    "tokens": Metric("Tokens", "processed since the line before"),
    "tokens_per_second": Metric("Speed", "tokens per second"),
    "generated_per_second": Metric("Sampling speed", "tokens per second"),
    "generation_seconds": Metric("Sampling time", "seconds per batch"),
    "waiting_seconds": Metric("Waiting for rollouts", "seconds per batch in which the trainer had nothing to compute"),
    "seconds": Metric("Time", "seconds since the line before"),
}


FINISH_REASONS = {
    "length": "cut off at the length limit",
    "context": "cut off: the context window was full",
    "turns": "ended at the limit of turns",
    "done": "ended by the environment",
    "error": "ended by an error of the environment",
}
"""What finish reasons mean. "stop" needs no explanation."""
TOOL_ERRORS = {
    "unparsable": "could not be read as a call of a tool",
    "unknown": "no tool has this name",
    "arguments": "the arguments do not fit the tool",
    "raised": "the tool raised an exception",
    "timeout": "the tool exceeded its time limit",
    "result": "the tool returned neither text nor JSON",
}
"""What the kinds of errors of tool calls mean."""
SOLUTION_ENDS = {
    "answer": "an answer was found, right or wrong",
    "unparsable": "no answer was found in the text",
    "depth": "too many reasoning steps",
    "tools": "code failed too many times in a row",
    "context": "the context window was full",
    "length": "a reasoning step was cut off at the length limit",
}
"""What the reasons mean for which solutions of a search end."""
UNREVISED = {
    "critique_cut_off": "the critique was cut off at the length limit",
    "critique_empty": "the critique was empty",
    "revision_cut_off": "the revision was cut off at the length limit",
    "revision_empty": "the revision was empty",
    "no_room": "the request left no room in the context window or in data.max_length",
}
"""What the reasons mean for which an answer was not revised."""
OF_EPISODES = ("finished_", "tool_error_", "ended_")
"""How the names of metrics begin that the report shows in a table of their own."""


def describe(key: str) -> Metric:
    """The metric's name and meaning. A prefix ``eval_`` is ignored; an unknown key is its own name."""
    key = key.removeprefix("eval_")
    if key == "reward_environment":
        meaning = "mean of the environment's own reward; the success rate if it is 0 or 1"
        return Metric("Reward: environment", meaning, "higher", headline=True)
    if key.startswith("finished_"):
        reason = key.removeprefix("finished_")
        meaning = FINISH_REASONS.get(reason, "ended by the policy, which called no tool")
        return Metric(f"Finished: {reason}", meaning, None, True)
    if key.startswith("ended_"):
        reason = key.removeprefix("ended_")
        return Metric(f"Ended: {reason}", SOLUTION_ENDS.get(reason, ""), None, True)
    if key.startswith("unrevised_"):
        reason = key.removeprefix("unrevised_")
        meaning = f"share of the attempts to revise: {UNREVISED.get(reason, reason)}"
        return Metric(f"Not revised: {reason.replace('_', ' ')}", meaning, None, True)
    if key.startswith("tool_error_"):
        kind = key.removeprefix("tool_error_")
        return Metric(f"Tool error: {kind}", f"per episode: {TOOL_ERRORS.get(kind, kind)}", "lower")
    if key.startswith("reward_"):
        name = key.removeprefix("reward_")
        if match := re.fullmatch(r"(.+)_(pass@|best_of_)(\d+)", name):
            name, kind, k = match.groups()
            if kind == "pass@":
                return Metric(
                    f"Reward: {name}, pass@{k}", f"prompts with a 1 among {k} completions", "higher", share=True
                )
            return Metric(f"Reward: {name}, best of {k}", f"of {k} completions, the one with the best score", "higher")
        return Metric(f"Reward: {name}", "mean over completions, before its weight", "higher", headline=True)
    return METRICS.get(key) or Metric(re.sub(r"[_/]+", " ", key).strip().capitalize())


def order(key: str) -> int:
    """Sort key of a metric: known ones first, in the order of METRICS."""
    known = list(METRICS)
    key = key.removeprefix("eval_")
    return known.index(key) if key in METRICS else len(known)


def headline(values: Mapping[str, float]) -> list[str]:
    """The keys of headline metrics, in order: score, kl, ... if completions are scored, else loss, accuracy, ...

    A reward that equals the score is left out: it is the only one. So are tool calls and their errors if they are 0.
    """
    names = {key: key.removeprefix("eval_") for key in values}
    score = next((values[key] for key, name in names.items() if name == "score"), None)
    hidden = set() if score is None else {"loss", "learning_rate"}
    hidden |= {name for key, name in names.items() if name.startswith("reward_") and values[key] == score}
    hidden |= {name for key, name in names.items() if name in ("tool_calls", "tool_errors") and not values[key]}
    ends = {f"{key}_{end}" for key in values for end in ("low", "high", "change_low", "change_high")}
    return sorted(
        (key for key, name in names.items() if describe(key).headline and name not in hidden and key not in ends),
        key=order,
    )


def number(value: float, share: bool = False, digits: int = 4) -> str:
    """Format a number with ``digits`` digits: ``1.235``, ``12,346``, ``5.0e-05``; ``73.4 %`` for a share."""
    if not math.isfinite(value):
        return str(value)
    if share:
        return f"{value:.1%}".replace("%", " %")
    if value == 0 or isinstance(value, int):
        return f"{int(value):,}"
    size = abs(value)
    if size < 1e-3 or size >= 1e15:
        return f"{value:.1e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size >= 1 else digits
    return f"{value:,.{decimals}f}"


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 step``, ``2,000 steps``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def duration(seconds: float) -> str:
    """Format a duration: ``42 s``, ``4 min 10 s``, ``1 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
