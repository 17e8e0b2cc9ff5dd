"""Completions of prompts from the command line or a file; log-probabilities of what a model would say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import torch
from rich.console import Console
from rich.progress import Progress

from burnish.config.yaml import OVERRIDE, Document, complain, mistakes
from burnish.data import readers as rows
from burnish.errors import UserError
from burnish.files import write_text
from burnish.generate.beams import Beams, search
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.models import loading
from burnish.models.forward import PLAIN, SamplingTransform, evaluating, hidden_states, token_logprobs, unwrap
from burnish.models.layout import Layout
from burnish.render.renderer import Renderer
from burnish.render.templates import set_template
from burnish.rl.collect import eos_ids
from burnish.types import Config, Example, Prompt, Sequence

AT_ONCE = 64
"""Completions that are generated before they are written."""
TOKEN_BUDGET = 8192
"""Tokens, padding included, whose log-probabilities are computed in one forward pass."""
DRAWN = ("temperature", "top_k", "top_p", "samples")
OWN = ("prompt", "completion", "finish_reason", "logprob", "logprob_mean", "source")


@dataclass(frozen=True)
class Loaded:
    """A language model that is ready to generate: ``Loaded("runs/tiny/ppo", model, tokenizer)``."""

    reference: str
    model: Any
    tokenizer: Any


def load(reference: str, template: str | None = None, dtype: loading.DType = "auto") -> Loaded:
    """A language model with its tokenizer, on the GPU where there is one.

    Args:
        reference: a folder (a model's, an adapter's or a stage's), a .gguf file or a hub id.
        template: name of a plain template, in place of the stored one.
        dtype: of the weights.

    Raises:
        UserError: it cannot be loaded, or there is no such template.
    """
    tokenizer = loading.load_tokenizer(reference)
    if template is not None:
        set_template(tokenizer, template)
    model = loading.load_policy(reference, dtype=loading.choose_dtype(dtype))
    return Loaded(reference, model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


# --- how ----------------------------------------------------------------------------------------------------------


def decoding(options: dict[str, Any]) -> Sampling | Beams:
    """How completions are made, from the options of ``burnish generate`` that were given.

    Raises:
        UserError: options that would be ignored beside each other, or a value out of its range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    sample = given.pop("sample", False)
    if "beams" not in given:
        if only := [_flag(name) for name in ("length_penalty", "returned") if name in given]:
            raise UserError(f"{', '.join(only)} rank beams: add --beams 4")
        if sample and given.get("temperature") == 0:
            raise UserError("--sample with --temperature 0: 0 always takes the likeliest token; leave one of them out")
        return sampling(given)
    drawn = [_flag(name) for name in DRAWN if name in given]
    if drawn and not sample:
        raise UserError(f"{', '.join(drawn)} set how beams are drawn, and --beams alone draws none: add --sample")
    if "length_range" in given:
        raise UserError("--length-range is for sampling: with --beams, set --max-new-tokens")
    return _checked(Beams, {"sample": sample, "max_new_tokens": 256} | given)


def sampling(options: dict[str, Any]) -> Sampling:
    """How completions are sampled, from the options that were given.

    Raises:
        UserError: options that would be ignored beside each other, or a value out of its range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    ignored = [_flag(name) for name in DRAWN[1:] if name in given]
    if given.get("temperature") == 0 and ignored:
        raise UserError(f"{', '.join(ignored)} with --temperature 0: nothing is drawn, so it would be ignored")
    return _checked(Sampling, given if "length_range" in given else {"max_new_tokens": 256} | given)


def _flag(name: str) -> str:
    return "--return" if name == "returned" else f"--{name.replace('_', '-')}"


def _checked(kind: type[Any], options: dict[str, Any]) -> Any:
    try:
        return kind(**options)
    except pydantic.ValidationError as error:
        complain(Document(options, {(): OVERRIDE}), mistakes(error, kind, options))
        raise


def prompts(texts: list[str], source: str | Path | None = None, system: str | None = None) -> list[Prompt]:
    """Prompts from texts or from a file of rows, below a system message where they bring none of their own."""
    found = rows.load(source or [{"prompt": text} for text in texts], (Prompt,)).rows
    return [_below(row, system) for row in found if isinstance(row, Prompt)]


def _below(row: Prompt, system: str | None) -> Prompt:
    if system is None or row.messages[0]["role"] == "system":
        return row
    return Prompt(({"role": "system", "content": system}, *row.messages), row.columns, row.source)


# --- completions --------------------------------------------------------------------------------------------------


def completions(
    loaded: Loaded, found: list[Prompt], how: Sampling | Beams, seed: int = 0, scores: bool = False, start: int = 0
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rows with the completions of the prompts from ``start`` on, some at a time; with how many prompts those were.

    A row has the prompt, the further columns of its row, completion, finish_reason and source. With ``scores`` it also
    has the sum and the mean a token of its log-probability under the model (without temperature, top-k and top-p).

    What is drawn for a prompt depends on the run's seed and its own tokens, not on the other prompts; a prompt that
    comes again gets new draws.
    """
    tokens = Renderer(loaded.tokenizer).prompts(found)
    _check_room(loaded.model, found, tokens)
    seen: dict[tuple[int, ...], int] = {}
    seeds: list[list[int]] = []
    for ids in tokens:
        first = seen.get(ids, 0)
        seen[ids] = first + how.samples
        key = int.from_bytes(hashlib.blake2b(repr(ids).encode(), digest_size=8).digest(), "big")
        seeds.append([request_seed(seed, key, first + g, 0) for g in range(how.samples)])
    step = 1 if isinstance(how, Beams) else max(1, AT_ONCE // how.samples)
    for first in range(start, len(found), step):
        part = slice(first, first + step)
        made = _generate(loaded, tokens[part], seeds[part], how)
        flat = [(row, c) for row, completions in zip(found[part], made, strict=True) for c in completions]
        lines = [_line(loaded, row, completion) for row, completion in flat]
        if scores:
            prompt_ids = [ids for ids, group in zip(tokens[part], made, strict=True) for _ in group]
            sequences = [
                completed(ids, c.tokens.tolist(), row.source) for ids, (row, c) in zip(prompt_ids, flat, strict=True)
            ]
            for line, values in zip(lines, logprobs(loaded.model, sequences), strict=True):
                count = max(1, len(values))
                line |= {"logprob": sum(values), "logprob_mean": sum(values) / count}
        yield len(found[part]), lines


def _check_room(model: Any, found: list[Prompt], tokens: list[tuple[int, ...]]) -> None:
    """Raise a UserError for a prompt that fills the context window, before others are completed."""
    context = getattr(unwrap(model).config.get_text_config(decoder=True), "max_position_embeddings", None)
    for row, ids in zip(found, tokens, strict=True):
        if context is not None and len(ids) >= context:
            raise UserError(
                f"{row.source}: a prompt of {len(ids)} tokens leaves no room in the model's context window of "
                f"{context}: shorten it, or take the row out"
            )


def _generate(
    loaded: Loaded, prompts: list[tuple[int, ...]], seeds: list[list[int]], how: Sampling | Beams
) -> list[list[Completion]]:
    """Completions of each prompt's token ids, drawn with its seeds."""
    model, tokenizer = loaded.model, loaded.tokenizer
    ends = frozenset(eos_ids(model, tokenizer))
    groups = list(zip(prompts, seeds, strict=True))
    if isinstance(how, Beams):
        settings: dict[str, Any] = {"eos_ids": ends, "pad_id": tokenizer.pad_token_id, "tokenizer": tokenizer}
        return [[c for seed in mine for c in search(model, ids, how, seed, **settings)] for ids, mine in groups]
    requests = [Request(ids, seed, how, ends) for ids, mine in groups for seed in mine]
    done = iter(complete(LocalGenerator(model, tokenizer), requests))
    return [[next(done) for _ in mine] for mine in seeds]


def _line(loaded: Loaded, row: Prompt, completion: Completion) -> dict[str, Any]:
    columns = {f"{name}_original" if name in OWN else name: value for name, value in row.columns.items()}
    return {
        "prompt": row.messages[0]["content"] if len(row.messages) == 1 else list(row.messages),
        **columns,
        "completion": loaded.tokenizer.decode(completion.tokens, skip_special_tokens=True).strip(),
        "finish_reason": completion.finish_reason,
        "source": row.source,
    }


# --- log-probabilities --------------------------------------------------------------------------------------------


def completed(prompt: tuple[int, ...], completion: list[int], source: str) -> Sequence:
    """A prompt with a completion, of which the completion's tokens are asked for."""
    return Sequence((*prompt, *completion), (False,) * len(prompt) + (True,) * len(completion), source)


def logprobs(
    model: Any, sequences: list[Sequence], how: SamplingTransform = PLAIN, budget: int = TOKEN_BUDGET
) -> list[list[float]]:
    """Log-probabilities of each sequence's trained tokens, given those before them."""
    found: list[list[float]] = [[] for _ in sequences]
    examples = [Example((sequence,)) for sequence in sequences]
    layout = Layout([model])
    with evaluating(model):
        for group, batch, values in layout.passes(
            lambda batch: token_logprobs(model, hidden_states(model, batch), batch, batch.loss_mask, how, "off")[0],
            examples,
            budget,
        ):
            learned = values[batch.loss_mask].split([int(sequences[i].loss_mask.sum()) for i in group])
            for i, mine in zip(group, learned, strict=True):
                found[i] = mine.tolist()
    return found


# --- files --------------------------------------------------------------------------------------------------------


def write(
    loaded: Loaded, found: list[Prompt], how: Sampling | Beams, output: Path, seed: int = 0, scores: bool = False
) -> int:
    """Write completions as JSON lines, and return their number.

    They are written aside until they are complete. Where the same call was stopped before, it goes on from there: the
    file aside is named by the hash of all that decides what the completions are.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{_fingerprint(loaded, found, how, seed, scores)}.partial")
    done = _whole_lines(aside)
    parts = [json.loads(line) for line in done]
    start = sum(count for count, _ in parts)
    with aside.open("w", encoding="utf-8") as file, Progress(console=Console(stderr=True), transient=True) as progress:
        file.writelines(done)
        task = progress.add_task("prompts", total=len(found), completed=start)
        for count, lines in completions(loaded, found, how, seed, scores, start):
            file.write(json.dumps([count, lines], ensure_ascii=False) + "\n")
            file.flush()
            parts.append([count, lines])
            progress.advance(task, count)
    text = [json.dumps(line, ensure_ascii=False) + "\n" for _, lines in parts for line in lines]
    write_text(output, "".join(text))
    aside.unlink()
    return len(text)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that are complete; a kill may have cut the last one."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [line.decode() for line in lines if line.endswith(b"\n")]


def _fingerprint(loaded: Loaded, found: list[Prompt], how: Config, seed: int, scores: bool) -> str:
    folder = Path(loading.resolve(loaded.reference))
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    settings = [type(how).__name__, how.model_dump(), seed, scores, loaded.tokenizer.chat_template]
    prompts = [(row.messages, dict(row.columns), row.source) for row in found]
    dtype = str(next(loaded.model.parameters()).dtype)
    return hashlib.sha256(repr([str(folder), stats, dtype, settings, prompts]).encode()).hexdigest()[:12]
