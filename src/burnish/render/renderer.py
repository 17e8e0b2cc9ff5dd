"""Rows to token ids: prompts, conversations with their loss masks, texts, and answers that are compared.

Every method handles many rows in the same steps: render all texts, tokenize them in one batch, and build the masks. The
singular forms (``conversation``, ``prompt``, ...) do the same for one row.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, combinations
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from burnish.errors import UserError
from burnish.render import masks, parsing
from burnish.render.masks import Added, Endings, Learn, Prefix
from burnish.render.parsing import Parsed
from burnish.render.special_tokens import LiteralEncoder, SpecialTokens, Tokens
from burnish.render.templates import ChatTemplate, Rendered, Unrendered
from burnish.render.texts import outline_key, texts_of
from burnish.render.truncate import Truncation, fit
from burnish.types import (
    Conversation,
    Example,
    Message,
    Messages,
    Pair,
    Preference,
    Prompt,
    Ranking,
    Sequence,
    Text,
    Tools,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
GROUP = 50_000_000  # characters of prefixes that are rendered together


class History(NamedTuple):
    """A conversation that goes on after a sampled turn: ``History(messages, ({"role": "tool", "content": "4"},), 2)``.

    Attributes:
        messages: the messages so far; the last one is the sampled turn.
        added: the messages that follow it.
        ended_by: the token that ended the sampled turn; None if it was cut off.
        since: index of the first message of the current sequence of ids.
        source: the row, for messages of errors.
        tools: the tools that the prompt shows.
    """

    messages: Messages
    added: Messages
    ended_by: int | None
    since: int = 0
    source: str = "conversation"
    tools: Tools = ()


class Extension(NamedTuple):
    """The ids that follow a sampled turn: ``Extension([13, 2, 91, 4], rewrites=False)``.

    ``rewrites`` says that the template writes earlier turns differently now, for example without their reasoning. The
    ids are then those of the whole conversation.
    """

    ids: list[int]
    rewrites: bool


class Renderer:
    """Converts rows to token ids with a tokenizer and its chat template.

    ``Renderer(tokenizer).prompt(({"role": "user", "content": "Hi"},))`` is ``(1, 4093, 198, ...)``. If a message spells
    a special token, it stays text. The tokenizer and its template are read once, so create a new renderer after you
    change them.

    Raises:
        UserError: if the tokenizer is not a fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        rust: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if rust is None:
            raise UserError(f"{tokenizer.name_or_path}: {type(tokenizer).__name__} is not a fast tokenizer")
        self.tokenizer = tokenizer
        self.special = SpecialTokens(tokenizer, rust)
        self._rust = rust
        self._told = False
        self._usual: dict[tuple[str | bool, ...], list[int] | None] = {}

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template."""
        return ChatTemplate(self.tokenizer)

    # --- prompts and conversations --------------------------------------------------------------------------------

    def prompt(self, messages: Messages, source: str = "prompt", tools: Tools = ()) -> tuple[int, ...]:
        """The ids that the model sees before it answers, including the opening of the assistant's turn.

        Raises:
            UserError: if the template rejects the messages.
        """
        return self.prompts([Prompt(messages, {}, source, tools)])[0]

    def prompts(self, rows: list[Prompt]) -> list[tuple[int, ...]]:
        """Like ``prompt``, for many rows."""
        rendered = self.template.render_many([Unrendered(row.messages, True, row.source, row.tools) for row in rows])
        return [tuple(tokens.ids) for tokens in self._tokenize(rendered)]

    def conversation(self, row: Conversation, learn: Learn | None = None, learn_eos: bool = True) -> Sequence:
        """A conversation whose assistant turns are learned.

        Args:
            row: the conversation.
            learn: ``last`` learns the last assistant turn, ``all`` all of them, ``completion`` those after the prompt,
                and ``everything`` every token that has a predecessor. None means ``completion`` if the row has one,
                otherwise ``all``.
            learn_eos: also learn the token that ends a turn. White space after it is never learned.

        Raises:
            UserError: if the template rejects the messages, changes the ids of a prompt when an answer follows, marks
                another number of turns than there are, or does not end a turn; or if there is nothing to learn.
        """
        return self.conversations([row], learn, learn_eos)[0]

    def conversations(
        self, rows: list[Conversation], learn: Learn | None = None, learn_eos: bool = True
    ) -> list[Sequence]:
        """Like ``conversation``, for many rows. An error may be that of any row."""
        return [_no_error(one) for one in self._conversations(rows, learn, learn_eos)]

    def learned_turns(
        self, rows: list[Conversation], learn: Learn | None = None, learn_eos: bool = True
    ) -> list[tuple[Sequence, ...]]:
        """The sequences of each row: usually one, in which all its turns are learned.

        If the template rewrites earlier turns, for example by removing their reasoning, each learned turn has a
        sequence of its own, rendered as the model would see it. A warning says so once.

        Raises:
            UserError: as in ``conversation``.
        """
        found = self._learned_turns(rows, learn, learn_eos)
        several = [row for row, sequences in zip(rows, found, strict=True) if len(sequences) > 1]
        if several and not self._told:
            self._told = True
            logger.warning(
                "the chat template rewrites earlier turns, so each learned turn of a conversation is a sequence of its "
                "own (the first one: %s)",
                several[0].source,
            )
        return found

    def completions(self, rows: list[Conversation]) -> list[Sequence]:
        """The sequence of each row, in which its completion is learned.

        Raises:
            UserError: as in ``conversation``; or a completion has several turns, and the template rewrites some.
        """
        sequences = []
        for row, turns in zip(rows, self._learned_turns(rows, "completion", learn_eos=True), strict=True):
            if len(turns) > 1:
                raise UserError(
                    f"{row.source}: a completion has {len(turns)} turns of the assistant, and the chat template "
                    "rewrites earlier turns, so they have no common sequence: make all turns but the last one part of "
                    "the prompt, or use a template that keeps earlier turns"
                )
            sequences += turns
        return sequences

    def _learned_turns(
        self, rows: list[Conversation], learn: Learn | None, learn_eos: bool
    ) -> list[tuple[Sequence, ...]]:
        found = self._conversations(rows, learn, learn_eos)
        rewritten = [i for i, one in enumerate(found) if isinstance(one, masks.RewrittenError)]
        turns = {
            i: [
                Conversation(rows[i].messages[: end + 1], end, rows[i].source, rows[i].tools)
                for end in masks.learned_messages(rows[i], learn)
            ]
            for i in rewritten
        }
        alone = [turn for its_turns in turns.values() for turn in its_turns]
        sequences = self._conversations(alone, "last", learn_eos)
        flat = iter(
            [
                self._spliced(turn, one, learn_eos) if isinstance(one, masks.RewrittenError) else one
                for turn, one in zip(alone, sequences, strict=True)
            ]
        )
        return [tuple(next(flat) for _ in turns[i]) if i in turns else (_no_error(one),) for i, one in enumerate(found)]

    def _spliced(self, row: Conversation, error: masks.RewrittenError, learn_eos: bool) -> Sequence:
        """The prompt of the last turn as the model sees it, followed by the turn.

        This is for templates that rewrite earlier turns once the last one follows. gpt-oss's leaves out the analysis
        before earlier tool calls. Then the prompt is no prefix of the conversation. The turn begins after the opening
        of the assistant's turn that is nearest before the first token that a different last turn changes.

        Raises:
            RewrittenError: the conversation has no such opening.
        """
        prompt = row.messages[:-1]
        probe = Message(role="assistant", content="x")
        rendered = self.template.render_many(
            [
                Unrendered(prompt, False, row.source, row.tools),
                Unrendered(prompt, True, row.source, row.tools),
                Unrendered((*prompt, probe), False, row.source, row.tools),
                Unrendered(row.messages, False, row.source, row.tools),
            ]
        )
        if left_out := masks.reasoning_left_out(row, [len(prompt)], rendered[-1].text):
            raise left_out
        bare, seen, other, whole = (tokens.ids for tokens in self._tokenize(rendered))
        opening = seen[len(bare) :]
        last = masks.same(whole, other)
        starts = [t for t in range(len(opening), last + 1) if whole[t - len(opening) : t] == opening]
        if not opening or seen[: len(bare)] != bare or not starts:
            raise error
        ids = seen + self._without_ending(whole)[starts[-1] :]
        turns = masks.turns_by_prefixes(
            row, [len(prompt)], ids, {Prefix(len(prompt), opens_turn=True): len(seen)}, self.special
        )
        if learn_eos and turns[0].end_id is None:
            ids, turns = masks.closed(row, [len(prompt)], ids, turns, self._endings)
        return Sequence(ids, masks.loss_mask(row, ids, turns, "last", learn_eos, self.special), row.source)

    def _conversations(
        self, rows: list[Conversation], learn: Learn | None, learn_eos: bool
    ) -> list[Sequence | masks.RewrittenError]:
        """The sequence of each row, or what the template rewrites in it."""
        template, special = self.template, self.special
        by_marks = template.marks_generation
        learned = [masks.learned_messages(row, learn) for row in rows]
        whole = template.render_many([Unrendered(row.messages, False, row.source, row.tools) for row in rows], by_marks)
        # Without marks, masks need the ids of prefixes. A plain template has no special token between a prompt and its
        # answer, so the ids of its prompts are checked too.
        needed = [
            masks.prefixes(row, messages, opened=not by_marks or template.plain, closed=not by_marks)
            for row, messages in zip(rows, learned, strict=True)
        ]
        tokenized = self._tokenize(whole, offsets=by_marks)
        lengths = self._prefix_lengths(rows, whole, tokenized, needed)
        sequences: list[Sequence | masks.RewrittenError] = []
        for row, one, tokens, messages, its_lengths in zip(rows, whole, tokenized, learned, lengths, strict=True):
            if left_out := masks.reasoning_left_out(row, messages, one.text):
                sequences.append(left_out)
                continue
            if isinstance(its_lengths, masks.RewrittenError):
                sequences.append(its_lengths)
                continue
            ids = tokens.ids
            if by_marks:
                turns = masks.turns_by_marks(row, messages, tokens, one.generated, special)
            else:
                stop = len(self._without_ending(ids))
                turns = masks.turns_by_prefixes(row, messages, ids[:stop], its_lengths, special)
            if learn_eos and any(turn.end_id is None for turn in turns):
                ids, turns = masks.closed(row, messages, ids, turns, self._endings)
            mask = masks.loss_mask(row, ids, turns, learn, learn_eos, special)
            sequences.append(Sequence(ids, mask, row.source))
        return sequences

    # --- prefixes of conversations --------------------------------------------------------------------------------

    def _prefix_lengths(
        self, rows: list[Conversation], whole: list[Rendered], tokenized: list[Tokens], needed: list[list[Prefix]]
    ) -> list[dict[Prefix, int] | masks.RewrittenError]:
        """The number of tokens of each prefix, or an error for a row in which the template rewrites a prefix."""
        lengths: list[dict[Prefix, int]] = [{} for _ in rows]
        rewritten: dict[int, masks.RewrittenError] = {}
        for group in _groups(needed, [len(one.text) for one in whole]):
            rendered = self._render_prefixes([(rows[i], whole[i], prefix) for i, prefix in group])
            shared = [
                _shared(one.text, whole[i].text, tokenized[i]) for (i, _), one in zip(group, rendered, strict=True)
            ]
            tails = list({tail for _, tail in filter(None, shared)})
            encodings = self._backend(as_text=False).encode_batch_fast(tails, add_special_tokens=False)
            ids_of = {tail: encoding.ids for tail, encoding in zip(tails, encodings, strict=True)}
            others = []
            for (i, prefix), one, found in zip(group, rendered, shared, strict=True):
                start, ids = (0, None) if found is None else (found[0], ids_of[found[1]])
                if ids is not None and tokenized[i].ids[start : start + len(ids)] == ids:
                    lengths[i][prefix] = start + len(ids)
                else:
                    others.append((i, prefix, one))
            for (i, prefix, _), tokens in zip(others, self._tokenize([one for *_, one in others]), strict=True):
                ids = tokens.ids if prefix.opens_turn else self._without_ending(tokens.ids)
                try:
                    masks.check_prefix(rows[i].source, tokenized[i].ids, ids, prefix.messages, self.special)
                except masks.RewrittenError as error:
                    rewritten.setdefault(i, error)
                lengths[i][prefix] = len(ids)
        return [rewritten.get(i, its_lengths) for i, its_lengths in enumerate(lengths)]

    def _render_prefixes(self, prefixes: list[tuple[Conversation, Rendered, Prefix]]) -> list[Rendered]:
        """Render the first messages of conversations, given as the row, its rendering, and the prefix."""
        unrendered = [
            Unrendered(row.messages[: prefix.messages], prefix.opens_turn, row.source, row.tools)
            for row, _, prefix in prefixes
        ]
        if not self.template.plain:
            return self.template.render_many(unrendered)
        # The text of a plain template up to the mark of an answer is what it writes for the prompt alone.
        rendered = []
        for (_, whole, _), prefix in zip(prefixes, unrendered, strict=True):
            answers_before = sum(message["role"] == "assistant" for message in prefix.messages)
            rendered.append(Rendered(whole.text[: whole.generated[answers_before][0]], (), *prefix))
        return rendered

    # --- completions ----------------------------------------------------------------------------------------------

    def parse(self, prompt: Iterable[int], ids: Iterable[int], tools: Tools = ()) -> Parsed:
        """A completion as a message with content, reasoning and tool calls.

        ``renderer.parse(prompt, ids).message`` is ``{"role": "assistant", "content": "", "tool_calls": [...]}``.

        Args:
            prompt: the ids before the completion, in which the template may have opened the reasoning.
            ids: the sampled ids, with or without the token that ended the completion.
            tools: the tools that the prompt shows. Arguments are cast to the types of their schemas.

        Raises:
            UserError: if the tokenizer's own ``response_template`` is not valid. Calls that cannot be read are no
                exception: ``Parsed.error`` says what is wrong with them.
        """
        sampled = list(ids)
        if sampled and sampled[-1] in self.special.ids:
            sampled.pop()
        return parsing.parse(self.tokenizer, self.template.source, prompt, sampled, tools)

    def extend(self, histories: list[History]) -> list[Extension]:
        """The ids that continue conversations after sampled turns, up to the opening of the assistant's next turn.

        Only what the template adds is tokenized. The sampled ids stay as they are.

        Raises:
            UserError: if the template rejects the messages.
        """
        wholes = [(*history.messages, *history.added) for history in histories]
        rendered = self.template.render_many(
            [Unrendered(one.messages, False, one.source, one.tools) for one in histories]
            + [Unrendered(whole, True, one.source, one.tools) for one, whole in zip(histories, wholes, strict=True)]
        )
        tokenized = list(self._tokenize(rendered))
        befores, afters = tokenized[: len(histories)], tokenized[len(histories) :]
        extensions = []
        for history, whole, one, before, after in zip(
            histories, wholes, rendered[len(histories) :], befores, afters, strict=True
        ):
            ids = self._without_ending(before.ids)
            sampled = [i for i in range(history.since, len(whole)) if whole[i]["role"] == "assistant"]
            row = Conversation(whole, None, history.source, history.tools)
            if after.ids[: len(ids)] != ids or masks.reasoning_left_out(row, sampled, one.text) is not None:
                extensions.append(Extension(after.ids, rewrites=True))
                continue
            turn = masks.without_end(ids, 0, len(ids), self.special)
            rest = after.ids[turn.end :]
            if history.ended_by is not None and (turn.end_id is not None or rest[:1] == [history.ended_by]):
                rest = rest[1:]
            extensions.append(Extension(rest, rewrites=False))
        return extensions

    # --- ends of turns --------------------------------------------------------------------------------------------

    @cached_property
    def _endings(self) -> Endings:
        """What the template writes where a turn ends, found out with short conversations."""
        user, said = Message(role="user", content="x"), Message(role="assistant", content="x")
        call: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "x", "arguments": {}}}],
        }
        result = Message(role="tool", content="x", name="x")
        x: Tools = ({"type": "function", "function": {"name": "x", "description": "x", "parameters": {}}},)
        opening = self._added((user,), (user,), opens_turn=True)
        if opening is not None and not opening.after:  # without a generation prompt, what begins the answer
            opening = self._added((user,), (user, said))
        after_answer = self._added((user, said), (user, said, user))
        after_call = self._added((user, call), (user, call, result), x)
        return masks.endings(opening, after_answer, after_call, self.special)

    def _added(self, messages: Messages, more: Messages, tools: Tools = (), opens_turn: bool = False) -> Added | None:
        """What the template writes only after the first of two conversations, and only after the second.

        None if it refuses one of them.
        """
        try:
            texts = [
                self.template.render(messages, "a short conversation", tools=tools).text,
                self.template.render(more, "a short conversation", opens_turn, tools=tools).text,
            ]
        except UserError:
            return None
        before, after = (
            encoding.ids for encoding in self._backend(False).encode_batch(texts, add_special_tokens=False)
        )
        same = masks.same(before, after)
        return Added(before[same:], after[same:])

    def _without_ending(self, ids: list[int]) -> list[int]:
        """The ids without what the template writes only after the last turn of a conversation."""
        if len(ids) < 2 or not self.special.ids.issuperset(ids[-2:]):
            return ids
        last = self._endings.last
        return ids[: len(ids) - len(last)] if last and ids[-len(last) :] == last else ids

    # --- answers --------------------------------------------------------------------------------------------------

    def answer(self, row: Conversation, truncation: Truncation | None = None) -> Sequence:
        """A prompt with one answer, as a reward model sees it in training and in scoring. No token is learned.

        Args:
            row: the prompt and its completion, which begins at ``row.completion_start``.
            truncation: the maximum length. Only the prompt is truncated, never the answer.

        Raises:
            UserError: if the template rejects the messages, or they are too long and must not be truncated.
        """
        return self.answers([row], truncation)[0]

    def answers(self, rows: list[Conversation], truncation: Truncation | None = None) -> list[Sequence]:
        """Like ``answer``, for many rows."""
        sequences = self._answers(rows, complete=False)
        if truncation is None or truncation.max_length is None:
            return sequences
        return [self._fit_answer(row, one, truncation) for row, one in zip(rows, sequences, strict=True)]

    def _answers(self, rows: list[Conversation], complete: bool) -> list[Sequence]:
        """The sequences of answers. If they must be ``complete``, the template must keep all of their reasoning."""
        rendered = self.template.render_many([Unrendered(row.messages, False, row.source, row.tools) for row in rows])
        if complete:
            for row, one in zip(rows, rendered, strict=True):
                if left_out := masks.reasoning_left_out(row, masks.learned_messages(row, "completion"), one.text):
                    raise left_out
        return [
            Sequence(tokens.ids, np.zeros(len(tokens.ids), np.bool_), row.source)
            for row, tokens in zip(rows, self._tokenize(rendered), strict=True)
        ]

    def _fit_answer(self, row: Conversation, sequence: Sequence, truncation: Truncation) -> Sequence:
        prompt, completion = row.messages[: row.completion_start], row.messages[row.completion_start :]

        def with_prompts(prompts: list[Prompt]) -> list[Example]:
            shorter = [
                replace(row, messages=p.messages + completion, completion_start=len(p.messages)) for p in prompts
            ]
            return [Example((sequence,)) for sequence in self.answers(shorter)]

        examples, _ = fit(Prompt(prompt, {}, row.source, row.tools), Example((sequence,)), with_prompts, truncation)
        if not examples:
            what = f"{row.source}: {len(sequence)} tokens, max_length {truncation.max_length}"
            if truncation.too_long == "drop":
                raise UserError(f"{what}: an answer that is scored cannot be dropped: set too_long: truncate_left")
            raise UserError(
                f"{what}: it does not fit even without its prompt: generate shorter answers, or use a reward model "
                "that reads more tokens"
            )
        return examples[0].sequences[0]

    def comparison(
        self, row: Preference | Ranking, *, ties: Literal["drop", "half"] = "drop", learned: bool = False
    ) -> Example:
        """The answers of a row, with the pairs that are compared.

        Args:
            row: two answers of which one is preferred, or K answers with scores. A ranking has K (K - 1) / 2 pairs,
                each of weight 1 / (K (K - 1) / 2).
            ties: whether answers with equal scores form no pair (``drop``) or one with p = 0.5 (``half``).
            learned: whether the answers are learned, as in DPO. Reward models learn no tokens.

        Raises:
            UserError: if no pair is left, or the template rejects the messages, leaves out the reasoning of an answer
                or all that distinguishes two answers.
        """
        return self.comparisons([row], ties=ties, learned=learned)[0]

    def comparisons(
        self, rows: list[Preference | Ranking], *, ties: Literal["drop", "half"] = "drop", learned: bool = False
    ) -> list[Example]:
        """Like ``comparison``, for many rows."""
        answers = [(row.chosen, row.rejected) if isinstance(row, Preference) else row.completions for row in rows]
        flat = [
            Conversation(row.prompt + answer, len(row.prompt), row.source, row.tools)
            for row, its_answers in zip(rows, answers, strict=True)
            for answer in its_answers
        ]
        sequences = iter(self.completions(flat) if learned else self._answers(flat, complete=True))
        examples = [
            Example(tuple(next(sequences) for _ in its_answers), _pairs(row, ties))
            for row, its_answers in zip(rows, answers, strict=True)
        ]
        for example in examples:
            _check_distinct(example)
        return examples

    # --- text -----------------------------------------------------------------------------------------------------

    def text(self, row: Text) -> Sequence:
        """Text followed by EOS. Every token is learned except the first, which has no predecessor.

        The tokenizer adds its own BOS, or ``[CLS]`` and ``[SEP]``.

        Raises:
            UserError: if the text spells a special token that the tokenizer cannot keep as text, or has only one token.
        """
        return self.texts([row])[0]

    def texts(self, rows: list[Text]) -> list[Sequence]:
        """Like ``text``, for many rows."""
        before, after = self._frame
        sequences = []
        for row, ids in zip(rows, self.encode_text((row.text for row in rows), framed=True), strict=True):
            self.special.check_absent(ids[len(before) : len(ids) - len(after)], f"{row.source}: the text")
            if ids[-len(self.special.eos) :] != self.special.eos:
                ids = ids + self.special.eos
            if len(ids) < 2:
                raise UserError(f"{row.source}: one token: there is nothing to learn")
            mask = np.ones(len(ids), np.bool_)
            mask[0] = False
            sequences.append(Sequence(ids, mask, row.source))
        return sequences

    def encode_text(self, texts: Iterable[str], framed: bool = False) -> list[list[int]]:
        """Tokenize texts, with special tokens as text. ``framed`` adds the tokenizer's own BOS and the like."""
        encodings = self._backend(as_text=True).encode_batch_fast(list(texts), add_special_tokens=framed)
        return [encoding.ids for encoding in encodings]

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _backend(self, as_text: bool) -> Tokenizer:
        """The Rust tokenizer without truncation and padding, whatever its file or another caller has set."""
        rust = self._rust
        if rust.truncation is not None:
            rust.no_truncation()
        if rust.padding is not None:
            rust.no_padding()
        if rust.encode_special_tokens != as_text:
            rust.encode_special_tokens = as_text
        return rust

    def _tokenize(self, rendered: list[Rendered], offsets: bool = False) -> list[Tokens]:
        """Tokenize rendered conversations in one batch, except those whose messages may spell special tokens."""
        texts = [one.text for one in rendered]
        tokenized = self._tokens_with_offsets(texts) if offsets else self._tokens_in_pieces(texts)
        return [
            self._framed(one, tokens if self._only_the_templates(one, tokens) else self._literal.encode(one))
            for one, tokens in zip(rendered, tokenized, strict=True)
        ]

    def _tokens_with_offsets(self, texts: list[str]) -> Iterator[Tokens]:
        for encoding in self._backend(as_text=False).encode_batch(texts, add_special_tokens=False):
            yield Tokens(encoding.ids, encoding.offsets)

    def _tokens_in_pieces(self, texts: list[str]) -> Iterator[Tokens]:
        """Tokens without offsets. Texts are split before special tokens, and each distinct piece is tokenized once.

        Many pieces repeat: rows share system messages and openings of turns, and prefixes repeat the text of their row.
        """
        pieces = [self.special.split(text) for text in texts]
        distinct = list(dict.fromkeys(piece for its_pieces in pieces for piece in its_pieces))
        encodings = self._backend(as_text=False).encode_batch_fast(distinct, add_special_tokens=False)
        ids_of = {piece: encoding.ids for piece, encoding in zip(distinct, encodings, strict=True)}
        for its_pieces in pieces:
            ends = zip(
                accumulate(map(len, its_pieces)), accumulate(len(ids_of[piece]) for piece in its_pieces), strict=True
            )
            yield Tokens([id for piece in its_pieces for id in ids_of[piece]], [], list(ends))

    def _only_the_templates(self, rendered: Rendered, tokens: Tokens) -> bool:
        """Whether all special tokens certainly come from the template."""
        special = self.special
        outlines = map(outline_key, rendered.messages)
        key = (rendered.add_generation_prompt, repr(rendered.tools) if rendered.tools else "", *outlines)
        if key not in self._usual:
            self._usual[key] = self._literal.usual(rendered)
        return (
            special.within(tokens.ids) == self._usual[key]
            and special.unknown not in tokens.ids
            and special.fragile.isdisjoint(tokens.ids)
            and special.spelled.search("".join(texts_of(rendered.messages))) is None
        )

    @cached_property
    def _literal(self) -> LiteralEncoder:
        return LiteralEncoder(self._rust, self.template, self.special)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer itself adds before and after a text."""
        (framed,), (bare,) = self.encode_text(["a"], framed=True), self.encode_text(["a"])
        first = next(t for t in range(len(framed)) if framed[t : t + len(bare)] == bare)
        return framed[:first], framed[first + len(bare) :]

    def _framed(self, rendered: Rendered, tokens: Tokens) -> Tokens:
        """Add the tokenizer's own special tokens, if the template is plain and the text does not end with them already.

        Other templates write their special tokens themselves.
        """
        before, after = self._frame if self.template.plain else ([], [])
        if rendered.add_generation_prompt or (after and tokens.ids[-len(after) :] == after):
            after = []
        if not before and not after:
            return tokens
        end = len(rendered.text)
        offsets = [*[(0, 0)] * len(before), *tokens.offsets, *[(end + 1, end + 1)] * len(after)]
        return Tokens(before + tokens.ids + after, offsets if tokens.offsets else [])


def _no_error(one: Sequence | masks.RewrittenError) -> Sequence:
    if isinstance(one, masks.RewrittenError):
        raise one
    return one


def _groups(needed: list[list[Prefix]], sizes: list[int]) -> Iterator[list[tuple[int, Prefix]]]:
    """Each prefix with the index of its row, in groups of limited size.

    The prefixes of a long conversation of many turns may not fit into memory all at once.
    """
    group, size = [], 0
    for i, prefixes in enumerate(needed):
        for prefix in prefixes:
            group.append((i, prefix))
            size += sizes[i]
            if size >= GROUP:
                yield group
                group, size = [], 0
    if group:
        yield group


def _shared(text: str, whole: str, tokens: Tokens) -> tuple[int, str] | None:
    """What a prefix shares with the tokens of the whole text: a number of tokens, and the rest of the prefix's text.

    None if the text is not a prefix, or the whole text was not tokenized in pieces.
    """
    if not tokens.pieces or not whole.startswith(text):
        return None
    pieces = bisect_right(tokens.pieces, len(text), key=itemgetter(0))
    characters, count = tokens.pieces[pieces - 1] if pieces else (0, 0)
    return count, text[characters:]


def _check_distinct(example: Example) -> None:
    """Raise a UserError if two of the answers have the same tokens."""
    seen: dict[bytes, int] = {}
    for i, sequence in enumerate(example.sequences):
        if (first := seen.setdefault(sequence.tokens.tobytes(), i)) != i:
            raise UserError(
                f"{example.source}: answers {first + 1} and {i + 1} have the same tokens, so there is nothing to "
                "prefer: the chat template leaves out what distinguishes them"
            )


def _pairs(row: Preference | Ranking, ties: Literal["drop", "half"]) -> tuple[Pair, ...]:
    if isinstance(row, Preference):
        p_chosen = 1.0 if row.p_chosen is None else row.p_chosen
        return (Pair(0, 1, margin=row.margin or 0.0, p_better=p_chosen),)
    every = list(combinations(range(len(row.completions)), 2))
    pairs = []
    for i, j in every:
        better, worse = (i, j) if row.scores[i] >= row.scores[j] else (j, i)
        tie = row.scores[i] == row.scores[j]
        if not tie or ties == "half":
            pairs.append(Pair(better, worse, weight=1 / len(every), p_better=0.5 if tie else 1.0))
    if not pairs:
        raise UserError(f"{row.source}: all answers have the same score: there is nothing to prefer")
    return tuple(pairs)
