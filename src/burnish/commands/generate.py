"""Completions of prompts from the command line or a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic
from rich.console import Console
from rich.progress import Progress

from burnish.config.yaml import OVERRIDE, Document, complain
from burnish.data import readers as rows
from burnish.errors import UserError
from burnish.files import storing, write_text
from burnish.generate.beams import Beams, search
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.mistakes import mistakes
from burnish.models import loading
from burnish.models.forward import unwrap
from burnish.models.limits import check_room
from burnish.models.loaded import Loaded
from burnish.models.loaded import load as load
from burnish.models.logprobs import logprobs
from burnish.render.renderer import Renderer
from burnish.terminal import check_typed
from burnish.types import Prompt, Sequence

AT_ONCE = 64
"""Number of completions generated between two writes."""
DRAWN = ("temperature", "top_k", "top_p", "samples")
OWN = ("prompt", "completion", "finish_reason", "logprob", "logprob_mean", "source")


# --- options ------------------------------------------------------------------------------------------------------


def decoding_settings(options: dict[str, Any]) -> Sampling | Beams:
    """The settings for sampling or beam search from the options of ``burnish generate``; None means not set.

    Raises:
        UserError: if an option would be ignored, or a value is out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    sample = given.pop("sample", False)
    if "beams" not in given:
        if only := [_flag(name) for name in ("length_penalty", "returned") if name in given]:
            raise UserError(f"{', '.join(only)} requires beam search: add --beams 4")
        if sample and given.get("temperature") == 0:
            raise UserError("--sample contradicts --temperature 0, which always takes the likeliest token: remove one")
        return sampling_settings(given)
    drawn = [_flag(name) for name in DRAWN if name in given]
    if drawn and not sample:
        raise UserError(f"{', '.join(drawn)} requires sampling, but --beams alone does not sample: add --sample")
    if "length_range" in given:
        raise UserError("--length-range does not apply to --beams: set --max-new-tokens instead")
    return _checked(Beams, {"sample": sample, "max_new_tokens": 256} | given)


def sampling_settings(options: dict[str, Any]) -> Sampling:
    """The sampling settings from command-line options; None means not set.

    Raises:
        UserError: if an option would be ignored, or a value is out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    ignored = [_flag(name) for name in DRAWN[1:] if name in given]
    if given.get("temperature") == 0 and ignored:
        raise UserError(f"{', '.join(ignored)} would have no effect with --temperature 0, which does not sample")
    return _checked(Sampling, given if "length_range" in given else {"max_new_tokens": 256} | given)


def _flag(name: str) -> str:
    return "--return" if name == "returned" else f"--{name.replace('_', '-')}"


def _checked(kind: type[Any], options: dict[str, Any]) -> Any:
    try:
        return kind.model_validate(options)
    except pydantic.ValidationError as error:
        complain(Document(options, {(): OVERRIDE}), mistakes(error, kind, options))
        raise


def prompts(texts: list[str], source: str | Path | None = None, system: str | None = None) -> list[Prompt]:
    """Read prompts from texts or from a file of rows, and add the system message to prompts without one."""
    given = [{"prompt": check_typed(text, f"prompt {i}")} for i, text in enumerate(texts, start=1)]
    loaded = rows.load(source or given, (Prompt,)).rows
    return [_with_system(row, system) for row in loaded if isinstance(row, Prompt)]


def _with_system(row: Prompt, system: str | None) -> Prompt:
    if system is None or row.messages[0]["role"] == "system":
        return row
    return replace(row, messages=({"role": "system", "content": system}, *row.messages))


# --- completions --------------------------------------------------------------------------------------------------


def completions(
    loaded: Loaded,
    prompt_rows: list[Prompt],
    decoding: Sampling | Beams,
    seed: int = 0,
    scores: bool = False,
    start: int = 0,
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Complete the prompts from ``start`` on in chunks. Yields the number of prompts in a chunk and its output rows.

    An output row has the prompt, the other columns of its input row, completion, finish_reason and source. With
    ``scores`` it also has the sum and the per-token mean of its log-probability under the model (without temperature,
    top-k and top-p).

    The completions of a prompt depend on the seed and the prompt's own tokens, not on the other prompts. A repeated
    prompt gets different completions.
    """
    tokens = Renderer(loaded.tokenizer).prompts(prompt_rows)
    check_room(loaded.model, prompt_rows, tokens)
    seen: dict[tuple[int, ...], int] = {}
    seeds: list[list[int]] = []
    for ids in tokens:
        first = seen.get(ids, 0)
        seen[ids] = first + decoding.samples
        key = int.from_bytes(hashlib.blake2b(repr(ids).encode(), digest_size=8).digest(), "big")
        seeds.append([request_seed(seed, key, first + g, 0) for g in range(decoding.samples)])
    generator = LocalGenerator(loaded.model, loaded.tokenizer, frozen=True)
    step = 1 if isinstance(decoding, Beams) else max(1, AT_ONCE // decoding.samples)
    for first in range(start, len(prompt_rows), step):
        part = slice(first, first + step)
        made = _generate(generator, tokens[part], seeds[part], decoding)
        generator.drop_cache()
        flat = [(row, c) for row, completions in zip(prompt_rows[part], made, strict=True) for c in completions]
        lines = [_line(loaded, row, completion) for row, completion in flat]
        if scores:
            prompt_ids = [ids for ids, group in zip(tokens[part], made, strict=True) for _ in group]
            sequences = [
                completed(ids, c.tokens.tolist(), row.source) for ids, (row, c) in zip(prompt_ids, flat, strict=True)
            ]
            for line, values in zip(lines, logprobs(loaded.model, sequences), strict=True):
                count = max(1, len(values))
                line |= {"logprob": sum(values), "logprob_mean": sum(values) / count}
        yield len(prompt_rows[part]), lines


def context_note(loaded: Loaded, decoding: Sampling | Beams) -> str | None:
    """A note if completions may be longer than the model's context window, which ends them."""
    context = getattr(unwrap(loaded.model).config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = decoding.longest if isinstance(decoding, Sampling) else decoding.max_new_tokens
    if context is None or longest <= context:
        return None
    return (
        f"note: the model's context window of {context:,} tokens, prompt included, ends completions before the "
        f"{longest:,} tokens that were asked for"
    )


def _generate(
    generator: LocalGenerator, prompts: list[tuple[int, ...]], seeds: list[list[int]], decoding: Sampling | Beams
) -> list[list[Completion]]:
    """Complete each prompt's token ids, once per seed."""
    model, tokenizer = generator.model, generator.tokenizer
    ends = frozenset(eos_ids(model, tokenizer))
    groups = list(zip(prompts, seeds, strict=True))
    if isinstance(decoding, Beams):
        settings: dict[str, Any] = {"eos_ids": ends, "pad_id": tokenizer.pad_token_id, "tokenizer": tokenizer}
        return [[c for seed in mine for c in search(model, ids, decoding, seed, **settings)] for ids, mine in groups]
    requests = [Request(ids, seed, decoding, ends) for ids, mine in groups for seed in mine]
    done = iter(complete(generator, requests))
    return [[next(done) for _ in mine] for mine in seeds]


def _line(loaded: Loaded, row: Prompt, completion: Completion) -> dict[str, Any]:
    columns = renamed(row.columns, OWN)
    return {
        "prompt": row.messages[0]["content"] if len(row.messages) == 1 else list(row.messages),
        **({"tools": list(row.tools)} if row.tools else {}),
        **columns,
        "completion": loaded.tokenizer.decode(completion.tokens, skip_special_tokens=True).strip(),
        "finish_reason": completion.finish_reason,
        "source": row.source,
    }


def renamed(columns: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The columns of a row, where those with a name in ``own`` are called ``NAME_original``.

    A name that is taken gets ``_original`` again.
    """
    new = {}
    for name, value in columns.items():
        called = name
        while called in own or (called != name and called in columns):
            called += "_original"
        new[called] = value
    return new


def completed(prompt: tuple[int, ...], completion: list[int], source: str) -> Sequence:
    """A sequence of a prompt and a completion, whose loss mask selects the completion."""
    return Sequence((*prompt, *completion), (False,) * len(prompt) + (True,) * len(completion), source)


# --- files --------------------------------------------------------------------------------------------------------


def write(
    loaded: Loaded,
    prompt_rows: list[Prompt],
    decoding: Sampling | Beams,
    output: Path,
    seed: int = 0,
    scores: bool = False,
) -> int:
    """Write completions as JSON lines, and return their number.

    Unfinished output is kept in a partial file, and repeating a stopped call resumes from it. The name of the partial
    file has a hash of everything that determines the completions.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = unfinished(output, loaded, prompt_rows, type(decoding).__name__, decoding.model_dump(), seed, scores)
    parts = read_parts(aside)
    start = sum(count for count, _ in parts)
    console = Console(stderr=True)
    with (
        storing(output),
        aside.open("w", encoding="utf-8") as file,
        Progress(console=console, transient=True) as progress,
    ):
        file.writelines(json.dumps(part, ensure_ascii=False) + "\n" for part in parts)
        file.flush()
        task = progress.add_task("prompts", total=len(prompt_rows), completed=start)
        for count, lines in completions(loaded, prompt_rows, decoding, seed, scores, start):
            file.write(json.dumps([count, lines], ensure_ascii=False) + "\n")
            file.flush()
            parts.append((count, lines))
            progress.advance(task, count)
    text = [json.dumps(line, ensure_ascii=False) + "\n" for _, lines in parts for line in lines]
    write_text(output, "".join(text))
    aside.unlink()
    return len(text)


def check_columns(prompt_rows: list[Prompt]) -> None:
    """Check that the columns of prompts can be written as JSON, before a model is loaded.

    Raises:
        UserError: a column cannot, such as a date or NaN.
    """
    for row in prompt_rows:
        for name, value in row.columns.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{row.source}: {name}: --output writes JSON, which cannot hold {_short(value)} ({error}): "
                    "write it as text, a finite number or null"
                ) from error


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."


Part = tuple[int, list[dict[str, Any]]]
"""A line of unfinished output: the number of prompts of a chunk, and its output rows."""
PART: pydantic.TypeAdapter[Part] = pydantic.TypeAdapter(Part)


def read_parts(path: Path) -> list[Part]:
    """The parts in a file of unfinished output. The last line may be damaged: the process was killed, or power failed.

    Raises:
        UserError: if another line is damaged.
    """
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    while lines and not lines[-1]:
        lines.pop()
    parts: list[Part] = []
    for number, line in enumerate(lines, start=1):
        try:
            parts.append(PART.validate_python(json.loads(line)))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(
                    f"{path}:{number}: this line of unfinished output is damaged: remove the file to start over"
                ) from error
    return parts


def unfinished(output: Path, loaded: Loaded, prompt_rows: list[Prompt], *settings: Any) -> Path:
    """The file of unfinished output. Its name has a hash of everything that determines the output."""
    folder = Path(loading.resolve(loaded.reference))
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    prompts = [(row.messages, row.tools, dict(row.columns), row.source) for row in prompt_rows]
    dtype = str(next(loaded.model.parameters()).dtype)
    known = [str(folder), stats, dtype, [*settings, loaded.tokenizer.chat_template], prompts]
    return output.with_name(f".{output.name}.{hashlib.sha256(repr(known).encode()).hexdigest()[:12]}.partial")
