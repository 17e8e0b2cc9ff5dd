"""The command line: `burnish run`, `inspect`, `generate`, `report`, `recipes`, `schema` and `doctor`.

Only typer and rich are imported here: torch and transformers take seconds, and `burnish --help` needs none of them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from burnish.types import UserError

# Idle threads that spin slow down everything else on the machine; torch reads this when it is imported. Forked
# tokenizers would otherwise warn at every data loader.
# Two idle threads that spin slow down everything beside them; the GGUF reader draws a progress bar into any file.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
STOPPED = 130


class Commands(typer.core.TyperGroup):
    """Turns the user's mistakes into one message and exit code 2; faults keep their traceback and exit with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            return super().invoke(ctx)
        except UserError as error:
            console = Console(stderr=True, soft_wrap=True, highlight=False)
            console.print("error:", style="bold red", end=" ")
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped; run the same command to go on", err=True)
            raise typer.Exit(STOPPED) from None


app = typer.Typer(
    cls=Commands,
    help="Post-train language models: from a recipe to a model, on a laptop or a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: seed=3 stages.ppo.trainer.learning_rate=1e-5"),
]
DType = Literal["auto", "float32", "bfloat16", "float16"]


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, even where a run can go on.")] = False,
) -> None:
    """Run a recipe; an unfinished run of the same recipe goes on where it stopped."""
    from burnish import pipeline
    from burnish.recipe import load
    from burnish.training.report import results

    folder = pipeline.run(load(recipe, overrides or []), fresh=fresh)
    Console(highlight=False).print(results(json.loads((folder / "manifest.json").read_text("utf-8"))))
    _say(f"done: {folder}  (report: {folder / 'report.html'})")


@app.command()
def inspect(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    row: Annotated[int | None, typer.Option(min=0, help="Show this row only, counted from 0.")] = None,
) -> None:
    """Show rows as the model will see them: tokens, what is learned, lengths, what is cut; trains nothing."""
    from burnish.inspect import show
    from burnish.recipe import load

    show(load(recipe, overrides or []), row, Console(highlight=False, soft_wrap=not sys.stdout.isatty()))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run: runs/NAME.")]) -> None:
    """Write one self-contained HTML file about a run: curves, samples before and after, the manifest."""
    if not (folder / "manifest.json").is_file():
        raise UserError(f"{folder}: not the folder of a run: it has no manifest.json")
    from burnish.training.report import write

    _say(str(write(folder)))


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    from burnish.recipe import shipped

    table = Table("recipe", "what it does", box=None, pad_edge=False)
    for name, description in shipped().items():
        table.add_row(name, description)
    Console(highlight=False).print(table)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML."""
    from burnish.recipe import schema as made

    typer.echo(json.dumps(made(), indent=2))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file or a hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...")] = None,
    source: Annotated[Path | None, typer.Option("--input", help="File of rows with prompts.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write JSON lines here instead of printing.")] = None,
    template: Annotated[str | None, typer.Option(help="Plain template, for a model without a chat template.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions a prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End a completion with this string; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: DType = "auto",
) -> None:
    """Complete prompts with a model: one completion a prompt, or --samples of them."""
    if bool(prompts) == bool(source):
        raise UserError("expected prompts on the command line or a file of them with --input, one of the two")
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "samples": samples,
        "stop": stop or [],
    }
    rows = _complete(model, prompts or [], source, template, options, seed, dtype)
    if output is None:
        for row in rows:
            _say(f"> {row['prompt']}" if len(rows) > 1 else "", row["completion"])
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    _say(f"{len(rows)} completions in {output}")


def _complete(
    model: str,
    prompts: list[str],
    source: Path | None,
    template: str | None,
    options: dict[str, Any],
    seed: int,
    dtype: DType,
) -> list[dict[str, Any]]:
    """Rows with prompt, completion, finish and source; every completion has a seed of its own."""
    import pydantic
    import torch

    from burnish.data import chat, rows
    from burnish.models import loading
    from burnish.recipe.places import OVERRIDE, Document, complain, mistakes
    from burnish.rollout.collect import eos_ids
    from burnish.rollout.generate import Local, Request, Sampling, request_seed
    from burnish.types import Prompt

    found = rows.load(source or [{"prompt": prompt} for prompt in prompts], (Prompt,)).rows
    try:
        sampling = Sampling(**options)
    except pydantic.ValidationError as error:
        complain(Document(options, {(): OVERRIDE}), mistakes(error, Sampling, options))
        raise
    tokenizer: Any = loading.load_tokenizer(model)
    if template is not None:
        chat.set_template(tokenizer, template)
    network = loading.load_policy(model, dtype=loading.choose_dtype(dtype))
    network.to("cuda" if torch.cuda.is_available() else "cpu")
    wanted = [(i, row, g) for i, row in enumerate(found) if isinstance(row, Prompt) for g in range(sampling.samples)]
    completions = Local()(
        network,
        [Request(chat.prompt(tokenizer, row), request_seed(seed, i, g, 0)) for i, row, g in wanted],
        sampling,
        eos_ids=eos_ids(network, tokenizer),
        pad_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
    )
    return [
        {
            "prompt": row.messages[-1]["content"] if len(row.messages) == 1 else list(row.messages),
            "completion": tokenizer.decode(completion.tokens, skip_special_tokens=True).strip(),
            "finish": completion.finish,
            "source": row.source,
        }
        for (_, row, _), completion in zip(wanted, completions, strict=True)
    ]


@app.command()
def doctor() -> None:
    """Say what this machine can do, and what would make it faster."""
    from burnish.machine import advice, examine

    found = examine()
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in found.items():
        table.add_row(name, value)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for line in advice(found):
        console.print(f"[yellow]advice:[/] {line}")


def _say(*lines: str) -> None:
    for line in lines:
        if line:
            typer.echo(line)


def main() -> None:
    """Entry point of the command ``burnish``."""
    app()
