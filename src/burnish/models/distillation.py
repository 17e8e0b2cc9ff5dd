"""A teacher: a frozen model whose distributions a student with the same tokenizer learns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.errors import UserError
from burnish.math.choices import Divergence
from burnish.math.distillation import Divergences, divergences, sampled
from burnish.math.tensors import logprobs_and_entropy
from burnish.models.forward import at_learned, head, hidden_states, unwrap
from burnish.models.limits import limits_of
from burnish.models.loaded import Loaded
from burnish.types import MicroBatch, Sequence


class Teacher:
    """A frozen model, and the part of the vocabulary in which it is compared with the student.

    Models of one tokenizer may have different numbers of embeddings, because some are padded. The rows that only one of
    them has stand for no token, and are left out of both distributions.

    Args:
        loaded: the teacher.
        student: the model that learns from it.
        tokenizer: the student's.

    Raises:
        UserError: if it is no language model, or the tokenizers differ.
    """

    def __init__(self, loaded: Loaded, student: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        if loaded.is_reward_model:
            raise UserError(f"method.teacher: {loaded.reference} is a reward model: expected a language model")
        if problem := vocabulary_problem(tokenizer.get_vocab(), loaded.tokenizer.get_vocab()):
            raise UserError(
                f"method.teacher: {loaded.reference} has another tokenizer than the student, so their distributions "
                f"cannot be compared: {problem}"
            )
        self.model: nn.Module = loaded.model.eval().requires_grad_(False)
        self.reference = loaded.reference
        self.limits = limits_of(unwrap(self.model).config, loaded.tokenizer)
        self.vocabulary = min(self.limits.vocabulary, unwrap(student).config.get_text_config(decoder=True).vocab_size)
        if (last := max(tokenizer.get_vocab().values())) >= self.vocabulary:
            raise UserError(
                f"method.teacher: the tokenizer has ids up to {last:,}, but {loaded.reference} or the student has only "
                f"{self.vocabulary:,} embeddings: resize them to the tokenizer"
            )

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Check that the teacher can read sequences.

        Raises:
            UserError: if one is too long for it, or the student sampled an id that stands for no token.
        """
        for sequence in sequences:
            if self.limits.longest is not None and len(sequence) > self.limits.longest:
                raise UserError(
                    f"{sequence.source}: {len(sequence):,} tokens, but the teacher {self.reference} reads at most "
                    f"{self.limits.longest:,}: lower data.max_length or generation.max_new_tokens"
                )
            if (largest := int(sequence.tokens.max(initial=0))) >= self.vocabulary:
                raise UserError(
                    f"{sequence.source}: the student sampled the id {largest:,}, which stands for no token and for "
                    f"which the teacher has no embedding: train the student first, or set generation.top_p"
                )

    def divergences(
        self,
        student: nn.Module,
        batch: MicroBatch,
        kind: Divergence | Literal["sampled"],
        beta: float = 0.5,
        temperature: float = 1.0,
    ) -> Divergences:
        """The divergences at every learned token, each (B, T) and 0 elsewhere.

        Args:
            student: the model that learns.
            batch: the tokens.
            kind: what ``loss`` is (``math.distillation``).
            beta: that of jensen_shannon.
            temperature: divisor of the logits of both models.
        """
        logits_of, teacher_logits_of = head(student), head(self.model)
        with torch.no_grad():
            teacher_hidden = hidden_states(self.model, batch)

        def chunk(rows: Tensor, teacher_rows: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            logits = logits_of(rows)[:, : self.vocabulary] / temperature
            with torch.no_grad():
                teacher_logits = teacher_logits_of(teacher_rows)[:, : self.vocabulary] / temperature
            if kind != "sampled":
                return divergences(logits, teacher_logits, kind, beta)
            measured = divergences(logits.detach(), teacher_logits, "reverse")
            pair = (logprobs_and_entropy(z, tokens, entropies=False)[0] for z in (logits, teacher_logits))
            return measured._replace(loss=sampled(*pair))

        hidden = [hidden_states(student, batch), teacher_hidden]
        return Divergences(*at_learned(chunk, hidden, batch, 2 * self.vocabulary))


def vocabulary_problem(vocabulary: dict[str, int], other: dict[str, int]) -> str | None:
    """What differs between the student's vocabulary and the teacher's, or None if they are equal."""
    if vocabulary == other:
        return None
    moved = sorted(token for token in vocabulary.keys() & other.keys() if vocabulary[token] != other[token])
    if moved:
        token = moved[0]
        return (
            f"{len(moved):,} of the tokens have other ids, the first is {token!r}, {vocabulary[token]} in the student "
            f"and {other[token]} in the teacher"
        )
    sides = {"student": vocabulary.keys() - other.keys(), "teacher": other.keys() - vocabulary.keys()}
    parts = [f"{len(only):,} only the {side} has, such as {min(only)!r}" for side, only in sides.items() if only]
    return f"of the tokens, {' and '.join(parts)}"
