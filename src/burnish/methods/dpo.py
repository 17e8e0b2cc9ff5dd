"""Direct preference optimization (Rafailov et al. 2023) and its relatives, KTO and ORPO among them."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import RowLoader
from burnish.errors import UserError
from burnish.math import losses
from burnish.math.choices import WITH_MARGIN, WITH_SOFT_LABELS, WITHOUT_REFERENCE
from burnish.math.statistics import wilson
from burnish.methods import METHODS
from burnish.methods.settings import DPOConfig
from burnish.models.forward import learned_logprobs
from burnish.models.heads import Network, disable_dropout
from burnish.models.reference import ARRAY as REFERENCE
from burnish.models.reference import ReferenceLogprobs
from burnish.protocols import Engine, Method, Run
from burnish.render.encode import cache_key, encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import (
    Conversation,
    Encoded,
    Example,
    Labelled,
    Metric,
    MicroBatch,
    Preference,
    Ranking,
    Row,
    Sequence,
    Terms,
    total_counts,
)

STEPS_OF_ALARM = 20
SMOOTHING_OF_ALARM = 0.9


class DPO(Method):
    """A loss of log p(answer) - log p_ref(answer), a mean over pairs (``burnish.math.preference``) or answers (KTO).

    KTO's z0 is one number an optimizer step: before its gradient, the policy scores each of its prompts with an answer
    to another prompt, without gradient. Each prompt's other answer is the same in every epoch, so that its reference
    can be precomputed.
    """

    spec = METHODS["dpo"]

    def __init__(self, **settings: Any) -> None:
        self.settings = DPOConfig(**settings)
        self.reference: ReferenceLogprobs | None = None

    @property
    def weights(self) -> dict[str, float]:
        """The loss of pairs or of answers, and the chosen answers' nll where it is asked for."""
        s = self.settings
        if s.loss == "kto":
            return {"kto": 1.0}
        if s.loss == "orpo":
            return {"nll": 1.0} | ({"preference": s.orpo_weight} if s.orpo_weight else {})
        return {"preference": 1.0} | ({"nll": s.nll_weight} if s.nll_weight else {})

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The policy, without dropout, and a frozen reference model."""
        disable_dropout(model)
        self.reference = None if self.settings.loss in WITHOUT_REFERENCE else ReferenceLogprobs(model)
        return Network(model)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """The compared answers of a row together, with their pairs; for KTO the labelled answers of a row."""
        loss = self.settings.loss
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Any]) -> list[Example]:
            for row in rows:
                _check_row(row, loss)
            examples = _judged(renderer, rows) if loss == "kto" else renderer.comparisons(rows, learned=True)
            for example in examples:
                _check_shared_prompt(example)
            return examples

        return encode(rows, to_examples, truncation, cache_key(tokenizer, self.spec.name, loss))

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> RowLoader:
        """Rows in a seeded order, made ready for the loss; watches whether the chosen answers lose probability."""
        kept: dict[str, float] = {}

        def finish(step: list[Example]) -> list[Example]:
            last = run.last()
            if "chosen" in last:
                run.log({"chosen_falling": watch(last["chosen"], kept)})
            return self.ready(step, engine)

        return RowLoader(self.referenced(examples, engine), run.rows_per_step, run.seed, finish, kept)

    def referenced(self, examples: list[Example], engine: Engine) -> list[Example]:
        """Examples, for KTO with answers to other prompts behind their own, and with the reference if precomputed."""
        if self.settings.loss == "kto":
            examples = mismatched(examples)
        if self.reference is None or self.settings.reference == "live" or not examples:
            return examples
        return self.reference.cached(engine, examples)

    def ready(self, examples: list[Example], engine: Engine) -> list[Example]:
        """What the loss takes: the examples of ``referenced`` with the live reference, and for KTO with z0."""
        if self.reference is not None and self.settings.reference == "live":
            examples = self.reference.live(engine, examples)
        if self.settings.loss != "kto":
            return examples

        def score(batch: MicroBatch) -> dict[str, Tensor]:
            return {"old_logprobs": learned_logprobs(engine.network.policy, batch)}

        strangers = [Example(e.sequences[len(e.sequences) // 2 :]) for e in examples]
        ratios = [self._ratio(s) for e in engine.run(score, strangers) for s in e.sequences]
        baseline = losses.kto_baseline(torch.tensor(ratios, dtype=torch.float64)).item()

        def own(example: Example) -> Example:
            mine = example.sequences[: len(example.sequences) // 2]
            return replace(example, sequences=tuple(_constant(s, baseline=baseline) for s in mine))

        return [own(example) for example in examples]

    def _ratio(self, sequence: Sequence) -> float:
        """Log-probability of a scored answer less that under the reference."""
        change = (sequence.arrays["old_logprobs"] - sequence.arrays[REFERENCE])[sequence.loss_mask]
        total = math.fsum(change.tolist())
        return total / len(change) if self.settings.averaged else total

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The loss and, as metrics, rewards and log-probabilities of both sides and the accuracy of the rewards.

        The reward of an answer is beta times its log-ratio, or for simpo and orpo what they compare.
        """
        s = self.settings
        logprobs = learned_logprobs(network.policy, batch)
        reference = batch.arrays.get(REFERENCE, torch.zeros_like(logprobs))
        # differences of tokens before their sum, which is large where answers are long and would round them away
        change = torch.where(batch.loss_mask, logprobs - reference, 0.0)
        ratios, totals, lengths = (per_sequence(x, batch) for x in (change, logprobs, batch.loss_mask.to(change.dtype)))
        if s.loss == "kto":
            return self._judged_terms(batch, ratios, totals, lengths)
        better, worse = batch.pairs.unbind(1)
        weights = batch.pair_weights.to(ratios.dtype)
        preference = losses.preference(
            s.loss,
            ratios[better],
            ratios[worse],
            beta=s.beta,
            lengths=(lengths[better], lengths[worse]) if s.averaged else None,
            gamma=s.gamma if s.loss == "simpo" else 0.0,
            label_smoothing=s.label_smoothing,
            margin=batch.margins.to(ratios.dtype) if s.loss in WITH_MARGIN else None,
            p_chosen=batch.p_better.to(ratios.dtype) if s.loss in WITH_SOFT_LABELS else None,
            weights=weights,
        )
        nll, tokens = weights * totals[better], weights * lengths[better]
        rewards = self._rewards(ratios, lengths)
        measured = {
            "margin": rewards[better] - rewards[worse],
            "chosen": rewards[better],
            "rejected": rewards[worse],
            "logprob_chosen": totals[better],
            "logprob_rejected": totals[worse],
        }
        return {
            "preference": preference.over("pairs"),
            "nll": Metric(-nll.sum(), tokens.sum(), (-nll, tokens)).over("chosen_tokens"),
            "accuracy": losses.pair_accuracy(rewards[better], rewards[worse], weights),
        } | {name: Metric.of(value.detach(), weights) for name, value in measured.items()}

    def _rewards(self, ratios: Tensor, lengths: Tensor) -> Tensor:
        s = self.settings
        ratios = ratios / lengths.clamp(min=1) if s.averaged else ratios
        return (ratios if s.loss == "orpo" else s.beta * ratios).detach()

    def _judged_terms(self, batch: MicroBatch, ratios: Tensor, totals: Tensor, lengths: Tensor) -> Terms:
        """Terms of KTO; the chosen are the good answers, and accuracy is the share that lies on its side of z0."""
        s = self.settings
        desirable, baseline = (batch.arrays[name].flatten()[batch.ends] for name in ("desirable", "baseline"))
        good, weights = desirable > 0.5, (lengths > 0).to(ratios.dtype)
        rewards = self._rewards(ratios, lengths)
        x = ratios / lengths.clamp(min=1) if s.averaged else ratios
        right = torch.where(good, rewards - s.beta * baseline, s.beta * baseline - rewards).sign()
        sides = {"chosen": weights * good, "rejected": weights * ~good}
        measured = {"": rewards, "logprob_": totals.detach()}
        return {
            "kto": losses.kto(x, good, baseline, s.beta, s.desirable_weight, s.undesirable_weight, weights).over(
                "sequences"
            ),
            "accuracy": Metric.of((1 + right) / 2, weights),
            "baseline": Metric.of(baseline, weights),
        } | {
            name + side: Metric.of(value, weight) for name, value in measured.items() for side, weight in sides.items()
        }

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Loss, rewards, and the accuracy of the rewards with its 95 % interval (Wilson)."""
        examples = self.ready(self.referenced(examples, engine), engine)
        metrics, rows = engine.evaluate(self, examples)
        run.measured(rows | {"margin": rows["chosen"] + rows["rejected"] * -1.0})
        counts = total_counts(examples)
        low, high = wilson(metrics["accuracy"], counts["sequences" if self.settings.loss == "kto" else "pairs"])
        margin = metrics["chosen"] - metrics["rejected"]
        return metrics | {"margin": margin, "accuracy_low": low, "accuracy_high": high}


def watch(chosen: float, kept: dict[str, float]) -> float:
    """How many steps in a row the smoothed reward of the chosen answers has fallen, ``chosen`` being the last one's.

    Warns where they are many; ``kept`` remembers the smoothed reward and the number.
    """
    before = kept.get("smoothed", chosen)
    kept["smoothed"] = SMOOTHING_OF_ALARM * before + (1 - SMOOTHING_OF_ALARM) * chosen
    kept["falling"] = kept.get("falling", 0.0) + 1 if kept["smoothed"] < before else 0.0
    if kept["falling"] == STEPS_OF_ALARM:
        warnings.warn(
            f"the log-probability of the chosen answers has fallen for {STEPS_OF_ALARM} steps: only their distance "
            "from the rejected ones grows; if the answers get worse, lower the learning rate, raise beta, or set "
            "nll_weight",
            stacklevel=2,
        )
    return kept["falling"]


# --- rows ----------------------------------------------------------------------------------------------------------


def _check_row(row: Preference | Ranking | Labelled, loss: str) -> None:
    """Whether the loss reads rows of this kind, and all that the row says."""
    if isinstance(row, Labelled) and loss != "kto":
        raise UserError(
            f"{row.source}: one labelled answer, but loss {loss} compares answers: set loss: kto, or give rows with "
            "prompt, chosen and rejected"
        )
    if isinstance(row, Ranking) and loss == "kto":
        raise UserError(
            f"{row.source}: a ranking, but kto reads answers that are good or bad: give rows with prompt, completion "
            "and label, or with prompt, chosen and rejected"
        )
    if isinstance(row, Preference):
        if row.margin and loss not in WITH_MARGIN:
            raise UserError(f"{row.source}: loss {loss} does not read margin: {', '.join(WITH_MARGIN)} do")
        if row.p_chosen not in (None, 1.0) and loss not in WITH_SOFT_LABELS:
            raise UserError(f"{row.source}: loss {loss} does not read p_chosen: {', '.join(WITH_SOFT_LABELS)} do")


def _check_shared_prompt(example: Example) -> None:
    """Whether all answers of a row follow the same ids."""
    if len({_prompt(sequence).tobytes() for sequence in example.sequences}) > 1:
        raise UserError(
            f"{example.source}: the answers change the ids of the prompt before them: use a template that ends the "
            "prompt with a token of its own, or let the answers begin with the space that the prompt ends with"
        )


def _judged(renderer: Renderer, rows: list[Preference | Labelled]) -> list[Example]:
    """The answers of each row, each marked as good or bad."""
    judged = [
        [(row.completion, row.label)] if isinstance(row, Labelled) else [(row.chosen, True), (row.rejected, False)]
        for row in rows
    ]
    conversations = [
        Conversation(row.prompt + answer, len(row.prompt), row.source, row.tools)
        for row, answers in zip(rows, judged, strict=True)
        for answer, _ in answers
    ]
    sequences = iter(renderer.completions(conversations))
    return [
        Example(tuple(_constant(next(sequences), desirable=float(good)) for _, good in answers)) for answers in judged
    ]


def _constant(sequence: Sequence, **numbers: float) -> Sequence:
    """The sequence with one number at every token."""
    return sequence.with_arrays(**{name: np.full(len(sequence), x) for name, x in numbers.items()})


def _prompt(sequence: Sequence) -> np.ndarray:
    """The tokens before the first one that is learned."""
    return sequence.tokens[: int(sequence.loss_mask.argmax())]


def mismatched(examples: list[Example]) -> list[Example]:
    """Each example with, behind its sequences, its prompt as often again, with answers of the next other prompt.

    They are no longer than the longest example is.
    """
    if len(examples) < 2:
        raise UserError("kto needs at least two rows: it compares a prompt's answers with those to another prompt")
    prompts = [_prompt(example.sequences[0]) for example in examples]
    keys = [tokens.tobytes() for tokens in prompts]
    longest = max(len(s) for e in examples for s in e.sequences)
    n = len(examples)
    other = [(i + 1) % n for i in range(n)]
    for i in reversed(range(2 * n)):  # around twice, for the last row's next one lies at the beginning
        following = (i + 1) % n
        if keys[following] == keys[i % n] and keys[other[following]] != keys[i % n]:
            other[i % n] = other[following]

    def behind(i: int) -> Example:
        strangers = []
        for k, sequence in enumerate(examples[i].sequences):
            answers = examples[other[i]].sequences
            answer = answers[k % len(answers)]
            start = len(_prompt(answer))
            tokens = np.concatenate([prompts[i], answer.tokens[start:]])[:longest]
            loss_mask = np.concatenate([np.zeros(len(prompts[i]), np.bool_), answer.loss_mask[start:]])[:longest]
            strangers.append(_constant(Sequence(tokens, loss_mask, sequence.source), desirable=0.0))
        return replace(examples[i], sequences=(*examples[i].sequences, *strangers))

    return [behind(i) for i in range(n)]


# --- tokens --------------------------------------------------------------------------------------------------------


def per_sequence(values: Tensor, batch: MicroBatch) -> Tensor:
    """Sums (N,) of values (B, T), which are 0 outside of sequences, in an order that is always the same."""
    last = values.new_full((1,), values.numel() - 1, dtype=torch.long)
    ends = torch.cat([batch.ends.new_full((1,), -1), batch.ends[:-1], last])
    return torch.segment_reduce(values.flatten(), "sum", lengths=ends.diff(), axis=0)
