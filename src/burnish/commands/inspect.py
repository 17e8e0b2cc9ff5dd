"""Shows a recipe's outline, and its rows as the model sees them: tokens, loss masks, lengths, memory and time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from burnish.commands.outline import episode_facts, is_shown, show_outline
from burnish.commands.plan import table
from burnish.config import Recipe, Stage, method_class, method_spec, sources
from burnish.config.resolve import environments_of
from burnish.config.row_stage import RowStage
from burnish.config.stage import check_rewards
from burnish.data import readers as rows
from burnish.errors import UserError
from burnish.generate.protocol import request_seed
from burnish.machine import matmul_rate
from burnish.models import loading
from burnish.models.batching import shared_length
from burnish.models.limits import limits_of
from burnish.plan.micro_batches import lengths_of
from burnish.plan.models import NotMadeYet, origin, tokenizer_of, without_weights
from burnish.plan.stage import plan_stage, rows_missing, sampled_tokens, this_machine
from burnish.render.encode import account
from burnish.render.renderer import Renderer
from burnish.render.spans import part_texts
from burnish.report.metrics import duration
from burnish.report.rounds import round_of
from burnish.rl.collect import with_tools
from burnish.rl.environment import Environments
from burnish.rl.episodes import first_prompt
from burnish.terminal import visible
from burnish.types import Encoded, Example, Prompt, Sequence

SHOWN_ROWS = 2
SHOWN_TOKENS = 20_000  # of a longer row, half of these from each end
SHOWN_CHARACTERS = 2_000  # of a row that is not shown as tokens
SHOWN_CHANGES = 5
BINS = 8
BAR = 40


def show(recipe: Recipe, row: int | None, console: Console) -> None:
    """Print every stage whose inputs exist, and the missing inputs of the others. If there are loops, also the outline.

    Raises:
        UserError: if rows or a tokenizer cannot be read, or there is no row ``row``.
    """
    if recipe.loops:
        console.rule("outline", align="left")
        show_outline(recipe, console)
    shown: list[Stage] = []
    waiting: list[str] = []
    for stage in recipe.stages:
        if not is_shown(recipe, stage):
            continue
        lacking = None if stage.run else _lacking(recipe, stage)
        if lacking and recipe.loops:
            waiting.append(stage.name)
            continue
        console.rule(f"{stage.name}: {stage.method.name if stage.method else stage.run}", align="left")
        same = next((one for one in shown if _same_rows(one, stage)), None)
        if stage.run:
            console.print(f"runs {stage.run}; its rows go to {recipe.folder / stage.name / 'data'}")
        elif lacking:
            console.print(f"waits for {lacking}, which burnish run creates")
        elif same is not None:
            console.print(f"reads the same rows as {same.name}", markup=False)
        else:
            (_show_row_stage if stage.makes_rows else _show_stage)(recipe, stage, row, console)
            shown.append(stage)
    if waiting:
        console.rule("waiting", align="left")
        console.print(f"rows that burnish run creates are needed by {', '.join(waiting)}", markup=False)


def _same_rows(one: Stage, other: Stage) -> bool:
    """Whether two stages are the same stage of different rounds, which reads the same rows in both."""
    first, second = round_of(one.name), round_of(other.name)
    return first is not None and second is not None and first[::2] == second[::2] and one.data == other.data


def _lacking(recipe: Recipe, stage: Stage) -> str | None:
    """The first missing input that an earlier stage must create before this stage's rows can be shown, or None."""
    if missing := rows_missing(recipe, stage):
        return missing
    reference, _ = origin(recipe, stage)
    return None if reference or stage.model is None else f"the model of stage {getattr(stage.model, 'stage', '')}"


def _show_stage(recipe: Recipe, stage: Stage, row: int | None, console: Console) -> None:
    assert stage.method is not None and stage.data is not None
    reference, _ = origin(recipe, stage)
    assert reference is not None
    tokenizer = tokenizer_of(recipe, stage)
    spec = method_spec(stage.method.name)
    settings = recipe.method_settings(stage.method)
    if Prompt in spec.kinds:
        settings |= {"reward": [], "sampling": stage.generation}
    environments = environments_of(stage, recipe.locate)
    if spec.environments:
        settings |= {"environments": environments}
    method = method_class(stage.method.name)(**settings)
    limits = limits_of(loading.load_config(reference, trust_remote_code=stage.trust_remote_code), tokenizer)
    splits = {}
    for split in ("train", "eval"):
        if getattr(stage.data, split) is not None:
            read = _read(recipe, stage, split, spec.kinds)
            encode = method.examples if split == "train" else method.eval_examples
            length = limits.default(stage.data.length, read.rows, spec.too_long)
            splits[split] = (read, encode(read.rows, tokenizer, length))
            limits.check(splits[split][1].examples)
            if length.max_length != stage.data.max_length and split == "train":
                console.print(f"data.max_length is not set: it is {length.max_length:,}, the most that the model reads")
    check_rewards(stage, {split: read for split, (read, _) in splits.items()})
    if stage.data.stream:
        console.print(f"a stream: showing the first {stage.data.shuffle_buffer:,} rows of train")
    if warning := sources.overlap(stage.data, recipe.folder):
        console.print(warning, markup=False)
    if stage.data.keep:
        console.print(f"ignored columns (data.keep): {', '.join(stage.data.keep)}", markup=False)
    console.print(_counts(splits))
    for read, encoded in splits.values():
        _list(console, "skipped", [skipped.message for skipped in read.skipped])
        for kind, lines in account(read.rows, encoded.changed)._asdict().items():
            if kind not in ("rows", "by_turn"):
                _list(console, kind, lines)
    examples = splits["train"][1].examples
    console.print(_histogram([len(s.tokens) for e in examples for s in e.sequences]))
    if environments is not None:
        _show_environment(stage, environments, tokenizer, console)
        examples = _begun(examples, environments, tokenizer, recipe.seed_of(stage), row)
    _show_rows(examples, tokenizer, row, console)
    for estimate in _cost(recipe, stage, examples):
        console.print(estimate, markup=False)


def _show_row_stage(recipe: Recipe, stage: Stage, row: int | None, console: Console) -> None:
    """Print the input of a stage that makes rows, and the names of the files that it writes."""
    making = RowStage(recipe, stage)
    read, spec = making.read(), making.spec
    table = Table("", "rows", box=None, pad_edge=False)
    table.add_row("rows", f"{len(read.rows):,}")
    table.add_row("skipped", ", ".join(f"{count} x {reason}" for reason, count in read.reasons.items()) or "0")
    if read.left_out:
        table.add_row("left out", ", ".join(f"{count} x {reason}" for reason, count in read.left_out.items()))
    prompts = [one for one in read.rows if isinstance(one, Prompt)] if "generation" in spec.takes else []
    reference, _ = origin(recipe, stage)
    if reference is not None and prompts:
        table.add_row("completions", f"{len(prompts) * stage.generation.samples:,}")
    table.add_row("writes", f"{', '.join(spec.outputs)} in {making.folder / 'data'}")
    console.print(table)
    _list(console, "skipped", [skipped.message for skipped in read.skipped])
    if reference is not None and prompts:
        tokenizer = tokenizer_of(recipe, stage)
        environments = environments_of(stage, recipe.locate)
        examples = _prompts(with_tools(prompts, environments, tokenizer), tokenizer)
        console.print(_histogram([len(s.tokens) for e in examples for s in e.sequences]))
        if environments is not None:
            _show_environment(stage, environments, tokenizer, console)
            examples = _begun(examples, environments, tokenizer, recipe.seed_of(stage), row)
        _show_rows(examples, tokenizer, row, console)
        return
    for index in _shown_rows(len(read.rows), row):
        title = visible(f"row {index} ({read.rows[index].source}):")
        console.print(title, style="bold", markup=False)
        text = json.dumps(read.records[index], ensure_ascii=False)
        console.print(visible(text[:SHOWN_CHARACTERS] + "..." * (len(text) > SHOWN_CHARACTERS)), markup=False)


def _prompts(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    return [
        Example((Sequence(ids, [False] * len(ids), prompt.source),), row=prompt)
        for prompt, ids in zip(prompts, Renderer(tokenizer).prompts(prompts), strict=True)
    ]


def _show_environment(
    stage: Stage, environments: Environments, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Print what answers the model, what it may call and how, and the limits of episodes."""
    table = Table("episodes", "", box=None, pad_edge=False)
    for name, fact in episode_facts(stage):
        table.add_row(name, fact)
    shows = Renderer(tokenizer).template.reads("tools")
    if not environments.turns:
        how = (
            "by the chat template" if shows else "not shown, as the chat template has no tools: <tool>name(...)</tool>"
        )
        table.add_row("tools are described", how)
    for name, kind in environments.kinds.items():
        own = ", ".join(schema["function"]["name"] for schema in kind.schemas)
        if own:
            table.add_row(f"tools of {name or kind.reference}", own)
    console.print(table)


def _begun(
    examples: list[Example],
    environments: Environments,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    row: int | None,
) -> list[Example]:
    """The examples, with the prompts that will be shown as their environments begin them in the first iteration."""
    begun = list(examples)
    for index in _shown_rows(len(examples), row):
        prompt = examples[index].row
        assert prompt is not None
        (begun[index],) = _prompts([first_prompt(environments, prompt, request_seed(seed, index, 0, 0))], tokenizer)
    return begun


def _read(recipe: Recipe, stage: Stage, split: str, kinds: tuple[type[Any], ...]) -> rows.Rows:
    """Read the rows of a split, or the first shuffle buffer of a stream."""
    data = stage.data
    assert data is not None
    if split == "train" and data.stream:
        return rows.Rows(*sources.stream(data, recipe.folder, kinds).take(data.shuffle_buffer))
    return sources.read(data, split, recipe.folder, kinds, recipe.seed_of(stage))


# --- counts -------------------------------------------------------------------------------------------------------


def percentile(values: list[int], share: float) -> int:
    """The smallest value that at least this share of values does not exceed: ``percentile([1, 2, 9], 0.5)`` is 2."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _counts(splits: dict[str, tuple[rows.Rows, Encoded]]) -> Table:
    table = Table("", *splits, box=None, pad_edge=False)
    columns = [_facts(read, encoded) for read, encoded in splits.values()]
    for name in columns[0]:
        table.add_row(name, *(facts[name] for facts in columns))
    return table


def _facts(read: rows.Rows, encoded: Encoded) -> dict[str, str]:
    sequences = [s for example in encoded.examples for s in example.sequences]
    lengths = [len(s.tokens) for s in sequences]
    learned = int(sum(s.loss_mask.sum() for s in sequences))
    total = sum(lengths)
    pairs = sum(len(example.pairs) for example in encoded.examples)
    shared = sum((len(e.sequences) - 1) * shared_length(e) for e in encoded.examples)
    values = sum(len(_values(s)) for s in sequences)
    what = [f"{learned:,} tokens ({learned / max(1, total):.1%})"] if learned or not pairs else []
    if any(isinstance(row, Prompt) for row in read.rows):
        what = ["sampled completions"]
    used = account(read.rows, encoded.changed)
    reasons = read.reasons + Counter({"cannot be encoded": len(used.skipped)})
    skipped = ", ".join(f"{count} x {reason}" for reason, count in reasons.items())
    return {
        "rows": f"{used.rows:,}",
        "skipped": skipped or "0",
        "dropped": f"{len(used.dropped):,}",
        "shortened": f"{len(used.shortened):,}",
        "sequences": f"{len(sequences):,}"
        + (f", one for each turn of {len(used.by_turn):,} rows" if used.by_turn else ""),
        "tokens": f"{total:,}" + (f", {shared:,} of them in prompts shared by several answers" if shared else ""),
        "learned": ", ".join(
            what + ([f"{pairs:,} comparisons"] if pairs else []) + ([f"{values:,} step values"] if values else [])
        ),
        "length percentiles 0 50 90 99 100": ", ".join(
            str(percentile(lengths, share)) for share in (0.0, 0.5, 0.9, 0.99, 1.0)
        )
        if lengths
        else "none",
    }


def _list(console: Console, title: str, lines: list[str]) -> None:
    for line in lines[:SHOWN_CHANGES]:
        console.print(visible(f"{title}: {line}"), markup=False)
    if len(lines) > SHOWN_CHANGES:
        console.print(f"{title}: and {len(lines) - SHOWN_CHANGES:,} more")


def _histogram(lengths: list[int]) -> Table:
    low, high = min(lengths), max(lengths) + 1
    width = max(1, -(-(high - low) // BINS))
    table = Table("tokens", "sequences", "", box=None, pad_edge=False)
    counts = [sum(start <= n < start + width for n in lengths) for start in range(low, high, width)]
    for start, count in zip(range(low, high, width), counts, strict=True):
        bar = "█" * -(-BAR * count // max(counts))
        table.add_row(f"{start}" if width == 1 else f"{start}-{start + width - 1}", f"{count:,}", bar)
    return table


# --- rows ---------------------------------------------------------------------------------------------------------


def _shown_rows(count: int, row: int | None) -> list[int]:
    """The indices of the first rows, or of the one that was asked for."""
    if row is not None and row >= count:
        raise UserError(f"--row {row}: there are only {count} rows, counting from 0")
    return list(range(count))[:SHOWN_ROWS] if row is None else [row]


def _show_rows(examples: list[Example], tokenizer: PreTrainedTokenizerBase, row: int | None, console: Console) -> None:
    indices = _shown_rows(len(examples), row)
    colors = console.is_terminal and console.color_system is not None
    if not colors and any(s.loss_mask.any() for e in examples for s in e.sequences):
        console.print("learned tokens are in [[double brackets]]", markup=False)
    for index in indices:
        example = examples[index]
        for number, sequence in enumerate(example.sequences):
            place = f", sequence {number + 1} of {len(example.sequences)}" if len(example.sequences) > 1 else ""
            if len(example.pairs) == 1:
                place = ", chosen" if number == example.pairs[0].better else ", rejected"
            notes = [f"{len(sequence.tokens)} tokens", *_notes(sequence)]
            title = visible(f"row {index} ({sequence.source}{place}): {', '.join(notes)}")
            console.print(title, style="bold", markup=False)
            size, half = len(sequence.tokens), SHOWN_TOKENS // 2
            if size <= SHOWN_TOKENS:
                console.print(marked(sequence, tokenizer, colors=colors))
            else:
                console.print(marked(sequence, tokenizer, range(half), colors=colors))
                console.print(f"... {size - 2 * half:,} tokens are not shown ...", style="bold", markup=False)
                console.print(marked(sequence, tokenizer, range(size - half, size), colors=colors))


def _notes(sequence: Sequence) -> list[str]:
    """The number of learned tokens and of step values in a sequence, and its reward."""
    learned, valued = int(sequence.loss_mask.sum()), len(_values(sequence))
    notes = [f"{learned} learned"] if learned else []
    notes += [f"{valued} values"] if valued else []
    return notes + ([f"reward {_reward(sequence):+g}"] if "advantages" in sequence.arrays else [])


def _values(sequence: Sequence) -> dict[int, float]:
    """Value targets keyed by token index. A target can be 0, so ``outcomes`` marks the positions."""
    if "targets" not in sequence.arrays:
        return {}
    ends = np.flatnonzero(sequence.arrays["outcomes"])
    return dict(zip(ends.tolist(), sequence.arrays["targets"][ends].tolist(), strict=True))


def _reward(sequence: Sequence) -> float:
    return float(sequence.arrays["advantages"][0]) if "advantages" in sequence.arrays else 1.0


def marked(sequence: Sequence, tokenizer: PreTrainedTokenizerBase, part: range | None = None, *, colors: bool) -> Text:
    """A sequence as text, with the value of each reasoning step after its last token, as in ``<+0.5>``.

    Learned tokens are green, or red if a negative reward makes them less likely; without colors they are in ``[[ ]]``.
    Special tokens are highlighted. ``part`` are the indices of the tokens to show; default: all.
    """
    text = Text()
    special = set(tokenizer.all_special_ids) if colors else set()
    learned = "green" if _reward(sequence) >= 0 else "red"
    for trained, is_special, span, value in _spans(sequence, tokenizer, part or range(len(sequence.tokens)), special):
        # show the value on the line of its step, before the newline
        end = "\n" if value is not None and span.endswith("\n") else ""
        body = visible(span.removesuffix(end))
        if colors:
            style = f"{learned if trained else 'dim'}{' bold reverse' if is_special else ''}"
            text.append(body.replace("\n", "⏎\n") + "⏎" * len(end) if trained else body, style)
        else:
            text.append(f"[[{body}]]" if trained else body)
        if value is not None:
            text.append(f"<{value:+.2g}>", ("bold green" if value >= 0 else "bold red") if colors else "")
            text.append(end)
    return text


def _spans(
    sequence: Sequence, tokenizer: PreTrainedTokenizerBase, part: range, special: set[int]
) -> Iterator[tuple[bool, bool, str, float | None]]:
    """Group consecutive tokens with the same style into spans, each with the value at its end."""
    values = _values(sequence)
    tokens, mask = sequence.tokens[part.start : part.stop].tolist(), sequence.loss_mask[part.start : part.stop].tolist()
    steps = accumulate((t in values for t in part[:-1]), initial=0)
    marks = [(trained, token in special, step) for token, trained, step in zip(tokens, mask, steps, strict=True)]
    groups = [(mark, len(list(group))) for mark, group in groupby(marks)]
    texts = part_texts(tokens, (size for _, size in groups), tokenizer)
    end = 0
    for ((trained, is_special, _), size), span in zip(groups, texts, strict=True):
        end += size
        yield trained, is_special, span, values.get(part[end - 1])


# --- memory and time ----------------------------------------------------------------------------------------------


def _cost(recipe: Recipe, stage: Stage, examples: list[Example]) -> Iterator[Table | str]:
    """Memory of one optimizer step, and the time of an epoch from the measured rate of matrix products."""
    machine = this_machine(recipe)
    prompts = any(example.row is not None for example in examples)
    lengths = lengths_of(examples, sampled_tokens(stage, prompts), stage.packed is not False)
    try:
        yield table(plan_stage(recipe, stage, machine, lengths=lengths), machine)
    except (UserError, NotMadeYet) as error:
        yield str(error)
    if not prompts and stage.model is not None:
        model = without_weights(recipe, stage, stage.model, stage.precision, machine.gpu)
        parameters = sum(p.numel() for p in model.parameters())
        passes = 6 * parameters if stage.adapter is None else 4 * parameters
        total = sum(len(s.tokens) for e in examples for s in e.sequences)
        seconds = passes * total / matmul_rate(model.dtype)
        # a training step reaches 42 to 48 % of the rate of large matrix products (docs/speed.md)
        yield f"time per epoch: at least {duration(seconds)}, about {duration(2.2 * seconds)}"
