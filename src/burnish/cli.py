"""The command line: one thin function for each command of `burnish`.

This module imports only typer and rich. Importing torch and transformers takes seconds, and `burnish --help` does not
need them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burnish import files, kernels
from burnish.errors import (
    LostProcessError,
    Terminated,
    UserCodeError,
    UserError,
    WaitingForPeople,
    is_out_of_memory,
    out_of_memory,
)
from burnish.terminal import check_typed, visible

WAITING = 3
STOPPED = 130
TERMINATED = 143


class Commands(typer.core.TyperGroup):
    """Reports a mistake of the user as one message with exit code 2. Any other error exits with code 1.

    An error in Burnish shows its full traceback. An error in the user's code shows only the user's frames.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        kernels.set_environment()
        try:
            return super().invoke(ctx)
        except UserError as error:
            _print_error(str(error))
            raise typer.Exit(2) from None
        except OSError as error:
            if (message := files.explain(error)) is None:
                raise
            _print_error(message)
            raise typer.Exit(2) from None
        except UserCodeError as error:
            typer.echo(error.traceback, err=True, nl=False)
            _print_error(str(error))
            raise typer.Exit(1) from None
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _print_error(out_of_memory(error))
            raise typer.Exit(2) from None
        except LostProcessError as error:
            _print_error(str(error))
            raise typer.Exit(1) from None
        except WaitingForPeople as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(WAITING) from None
        except Terminated as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(TERMINATED) from None
        except KeyboardInterrupt:
            typer.echo("stopped; run the same command again to resume", err=True)
            raise typer.Exit(STOPPED) from None


app = typer.Typer(
    cls=Commands,
    help="Post-train language models: from a recipe to a model, on a laptop or a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _check_text(parameter: typer.CallbackParam, value: str | list[str] | None) -> str | list[str] | None:
    """Refuse options with bytes that are not text."""
    for text in [value] if isinstance(value, str) else value or []:
        check_typed(text, f"--{parameter.name}")
    return value


@app.callback()
def _refuse_several_processes(context: typer.Context) -> None:
    # without a docstring, which would replace the help of the app
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1 and context.invoked_subcommand != "run":
        raise UserError(
            f"WORLD_SIZE={size}: torchrun or accelerate launch started {size} processes, but only burnish run uses "
            f"several: start burnish {context.invoked_subcommand} without a launcher"
        )


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: seed=3 stages.ppo.trainer.learning_rate=1e-5"),
]
ModelArgument = Annotated[
    str, typer.Argument(help="A folder (of a model, adapter or stage), a .gguf file or a hub id.")
]
TemplateOption = Annotated[
    str | None, typer.Option("--template", help="Plain template, for a model without a chat template.")
]
Precision = Literal["auto", "float32", "bf16", "fp16"]
PrecisionOption = Annotated[
    Precision,
    typer.Option(help="bf16 halves the memory of a model. auto: bf16 where it is faster, otherwise float32."),
]


@contextmanager
def _without_collection() -> Iterator[None]:
    """Import modules without garbage collection, which would take a fifth of the time.

    The objects that exist afterwards live as long as the process, so later collections skip them.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="STAGE", help="Run this stage and all later ones again, such as ppo or loop/2/improve."
        ),
    ] = None,
) -> None:
    """Run a recipe. An unfinished run of the same recipe resumes where it stopped."""
    from burnish.config import load
    from burnish.config.processes import Processes

    processes = Processes.join()
    with processes.one_message():
        loaded = load(recipe, overrides or [])  # first, because what follows imports torch
        if count := processes.to_start(loaded.parallel):
            options = [*(["--fresh"] if fresh else []), *(["--from", start] if start is not None else [])]
            arguments = ["run", *options, "--", recipe, *(overrides or [])]
            if loaded.parallel.launcher == "ray":
                from burnish.config.ray_launch import launch as launch_with_ray

                raise typer.Exit(launch_with_ray(count, arguments))
            from burnish.config.launch import launch

            raise typer.Exit(launch(loaded.parallel, count, arguments))
        processes.connect(loaded.parallel)
        if any(stage.model is not None for stage in loaded.stages) and not any(s.template for s in loaded.stages):
            from burnish.render import worker

            worker.start()  # its imports take half a second, and run beside those of this process
        with _without_collection():
            from burnish.config import run as pipeline
            from burnish.machine import use_one_gpu
            from burnish.report.page import results

        if processes.size == 1 and (advice := use_one_gpu()):
            typer.echo(advice, err=True)
        folder = pipeline.run(loaded, fresh=fresh, start=start, processes=processes)
        processes.leave()
    if not processes.first:
        return
    table = results(json.loads((folder / "manifest.json").read_text("utf-8")))
    if table.row_count:
        _print_table(table)
    _print(f"done: {folder}", f"report: {folder / 'report.html'}")


@app.command()
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="A YAML file or the name of a shipped recipe; or a model: a folder (of a model, adapter or stage), a "
            ".gguf file or a hub id.",
        ),
    ],
    overrides: Overrides = None,
    row: Annotated[int | None, typer.Option(min=0, help="Show only this row of a recipe, counting from 0.")] = None,
) -> None:
    """Show a recipe's rows as the model sees them, or what a model is and computes. This trains nothing."""
    from burnish.config import load, shipped

    console = _console(soft_wrap=not sys.stdout.isatty())
    if Path(source).suffix in (".yaml", ".yml") or source in shipped():
        loaded = load(source, overrides or [])  # first, because what follows imports torch
        from burnish.commands.inspect import show

        show(loaded, row, console)
        return
    if overrides or row is not None:
        raise UserError(f"{source}: not a recipe, and --row and KEY=VALUE apply only to recipes")
    from burnish.commands.inspect_model import show as show_model

    show_model(source, console)


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, show_default="this machine", help="Number of GPUs.")] = None,
    memory: Annotated[
        float | None,
        typer.Option(min=0.1, show_default="this machine's", help="GiB of each GPU, or of each process on a CPU."),
    ] = None,
    row_tokens: Annotated[
        int | None,
        typer.Option(min=1, show_default="as many as possible", help="Tokens of rows that do not exist yet."),
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Show only this stage, such as ppo or loop/1/improve.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Simulate the time with more workers, from this finished run.")
    ] = None,
    rollout_workers: Annotated[
        str | None, typer.Option(metavar="N,N", help="With --profile: processes that sample. The other GPUs train.")
    ] = None,
    staleness: Annotated[
        str | None, typer.Option(metavar="N,N", show_default="0,1,2", help="With --profile: method.max_staleness.")
    ] = None,
) -> None:
    """Show the memory that each stage needs, and what to change if it does not fit. No weights are loaded."""
    from burnish.config import load

    for option, given in {"--rollout-workers": rollout_workers, "--staleness": staleness}.items():
        if given is not None and profile is None:
            raise UserError(f"{option} would have no effect without --profile, the folder of a finished run")
    load(recipe, overrides or [])  # first, because what follows imports torch
    from burnish.commands import plan as planning

    options = planning.Options(gpus, memory, row_tokens, stage, profile, rollout_workers, staleness)
    planning.show(recipe, overrides or [], options, _console(soft_wrap=not sys.stdout.isatty()))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run: runs/NAME.")]) -> None:
    """Write a self-contained HTML report of a run: curves, samples before and after, and the manifest."""
    from burnish.config.manifest import MANIFEST, read_manifest

    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder}: not the folder of a run: {MANIFEST} is missing")
    read_manifest(folder / MANIFEST)
    from burnish.report.page import write

    _print(str(write(folder)))


@app.command()
def merge(
    adapter: Annotated[str, typer.Argument(help="An adapter's folder, or the folder of a stage that trained one.")],
    base: Annotated[str | None, typer.Option(help="Location of the base model, if it was moved.")] = None,
    output: Annotated[Path | None, typer.Option(help="A new folder. Default: ADAPTER-merged.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the base model.")] = False,
) -> None:
    """Merge an adapter into the base model it was trained on. Any other base is an error."""
    _check_names(adapter)
    from burnish.config.card import merged_card
    from burnish.models.merge import merge as fold

    card = partial(merged_card, trust_remote_code=trust_remote_code)
    fold(adapter, base, output, card=card, say=_print, trust_remote_code=trust_remote_code)


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    from burnish.config import shipped

    table = Table("recipe", "what it does", box=None, pad_edge=False)
    for name, description in shipped().items():
        table.add_row(name, description)
    _print_table(table)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, which editors can use to complete and check YAML."""
    from burnish.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...")] = None,
    source: Annotated[Path | None, typer.Option("--input", help="File with one prompt per row.")] = None,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write JSON lines here instead of printing.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(callback=_check_text, help="System message for prompts without one.")
    ] = None,
    template: TemplateOption = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, show_default="256")] = None,
    length_range: Annotated[
        tuple[int, int] | None,
        typer.Option(metavar="LOW HIGH", help="Draw each completion's token limit from this range."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, show_default="1", help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    samples: Annotated[int | None, typer.Option(min=1, show_default="1", help="Completions per prompt.")] = None,
    beams: Annotated[int | None, typer.Option(min=1, help="Number of beams for beam search.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample the next beams instead of taking the best.")] = False,
    length_penalty: Annotated[
        float | None, typer.Option(show_default="1", help="Rank beams by log p / tokens ** LENGTH_PENALTY.")
    ] = None,
    returned: Annotated[int | None, typer.Option("--return", min=1, help="Number of best beams to return.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(callback=_check_text, help="End a completion at this string. Can be repeated."),
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Show each completion's log-probability: sum and mean per token.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    precision: PrecisionOption = "auto",
) -> None:
    """Complete prompts by sampling, greedily (--temperature 0), or with beam search (--beams 4 [--sample])."""
    if bool(prompts) == bool(source):
        raise UserError("expected either prompts on the command line or a file with --input")
    if source is not None and output is not None and os.path.realpath(source) == os.path.realpath(output):
        raise UserError("--output would overwrite the input: choose another file")
    _make_room(output)
    _check_names(model, source)
    from burnish.commands import generate as inference

    decoding = inference.decoding_settings(
        {
            "max_new_tokens": max_new_tokens,
            "length_range": list(length_range) if length_range else None,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "samples": samples,
            "beams": beams,
            "sample": sample,
            "length_penalty": length_penalty,
            "returned": returned,
            "stop": stop,
        }
    )
    rows = inference.prompts(prompts or [], source, system)
    if output is not None:
        inference.check_columns(rows)
    loaded = inference.load(model, template, precision)
    if note := inference.context_note(loaded, decoding):
        typer.echo(note, err=True)
    if output is not None:
        _print(f"{inference.write(loaded, rows, decoding, output, seed, scores)} completions in {output}")
        return
    for _, lines in inference.completions(loaded, rows, decoding, seed, scores):
        for line in lines:
            prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
            shown = (f"> {prompt}" if len(rows) > 1 else "", line["completion"])
            _print(*(map(visible, shown) if sys.stdout.isatty() else shown))
            if scores:
                _print(f"[log p {line['logprob']:.4f}, {line['logprob_mean']:.4f} per token, {line['finish_reason']}]")


@app.command()
def search(
    model: ModelArgument,
    source: Annotated[Path, typer.Argument(metavar="ROWS", help="File with one question per row.")],
    method: Annotated[
        list[str],
        typer.Option(
            metavar="METHOD[:KEY=VALUE,...]",
            help="greedy, majority, best-of-n, sbs, dvts or mcts. Repeat it to compare methods.",
            callback=_check_text,
        ),
    ],
    beams: Annotated[int | None, typer.Option(min=1, show_default="3", help="sbs, dvts: solutions to keep.")] = None,
    children: Annotated[
        int | None, typer.Option(min=1, show_default="5", help="sbs, dvts, mcts: next steps to sample for a solution.")
    ] = None,
    simulations: Annotated[int | None, typer.Option(min=1, show_default="40", help="mcts: simulations.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, show_default="5", help="majority, best-of-n: solutions to sample.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, show_default="1", help="All methods but greedy, which samples nothing.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, show_default="256", help="Limit of a step.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, show_default="8", help="Maximum number of steps.")] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            callback=_check_text,
            show_default="that of the value head",
            help="The text that ends a step. Write a line break as \\n.",
        ),
    ] = None,
    final: Annotated[
        str | None, typer.Option(callback=_check_text, help="A step with this text ends a solution.")
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            metavar="SETTINGS",
            callback=_check_text,
            help="Run the code of steps in the sandbox. YAML as in recipes, {} for the defaults.",
        ),
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            callback=_check_text, show_default="math", help="How to find answers: math, last_line or file.py:name."
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            callback=_check_text, show_default="math", help="How to check answers: math, exact or file.py:name."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(callback=_check_text, show_default="answer", help="The column of known answers.")
    ] = None,
    question: Annotated[
        str | None, typer.Option(callback=_check_text, show_default="prompt", help="The column of questions.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="ROWS", help="Use only the first rows.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Limit of sampled tokens of a question.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Time limit of a question, shared by those searched together.")
    ] = None,
    together: Annotated[
        int | None, typer.Option(min=1, show_default="64", help="Number of questions searched together.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, show_default="256", help="Maximum number of steps sampled together.")
    ] = None,
    template: TemplateOption = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    precision: PrecisionOption = "auto",
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write solutions and their trees as JSON lines to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Solve questions by search over reasoning steps, and compare methods and their costs."""
    if output is not None and os.path.realpath(source) == os.path.realpath(output):
        raise UserError("--output would overwrite the questions: choose another file")
    _make_room(output)
    _check_names(model, source)
    from burnish.commands import generate as inference
    from burnish.commands import search as searching

    strategies = searching.strategies(
        method, {"beams": beams, "children": children, "simulations": simulations, "samples": samples}
    )
    settings = searching.settings_of(
        strategies,
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "max_new_tokens": max_new_tokens,
            "depth": depth,
            "delimiter": delimiter,
            "final": final,
            "code": code,
            "find": find,
            "check": check,
            "column": column,
            "tokens": tokens,
            "seconds": seconds,
            "together": together,
            "slots": slots,
            "seed": seed,
        },
    )
    rows = searching.questions(source, question)[:limit]
    if output is not None:
        inference.check_columns(rows)
    loaded = inference.load(model, template, precision)
    solved = searching.run(loaded, rows, strategies, settings, output)
    result = searching.results(loaded, solved, seed)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    _print(*searching.notes(result))
    _print_table(searching.table(result))
    if output is not None:
        _print(f"{sum(map(len, solved.values())):,} solutions in {output}")


@app.command()
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(callback=_check_text, help="System message.")] = None,
    template: TemplateOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(callback=_check_text, help="End an answer at this string. Can be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    precision: PrecisionOption = "auto",
) -> None:
    """Chat with a model. Type /help for a list of commands."""
    _check_names(model)
    from burnish.commands import generate as inference
    from burnish.commands.chat import Talk
    from burnish.commands.chat import run as talk_in_terminal

    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = inference.sampling_settings(options | {"stop": stop})
    talk_in_terminal(Talk(inference.load(model, template, precision), sampling, seed, system))


@app.command(name="eval")
def evaluate(
    model: ModelArgument,
    recipe: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A YAML file, settings, or both: data.eval=chat.jsonl"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write JSON with all samples to this file.")
    ] = None,
) -> None:
    """Evaluate a model: perplexity, pair accuracy, rewards, KL, pass@k and win rate, with 95 % intervals."""
    from burnish.config.evaluation import load_evaluation
    from burnish.files import write_text

    evaluation = load_evaluation(recipe or [])
    _make_room(output)
    _check_names(model)
    from burnish.commands import evaluate as measuring

    result = measuring.evaluate(model, evaluation)
    if output is not None:
        write_text(output, json.dumps(result, indent=1, ensure_ascii=False))
    if as_json:
        typer.echo(json.dumps({key: value for key, value in result.items() if key != "samples"}, indent=1))
        return
    for kind in ("skipped", "dropped", "shortened"):
        _print(*(f"{kind}: {line}" for line in result[kind]))
    if by_turn := result["by_turn"]:
        _print(f"{by_turn:,} rows measured turn by turn, because the chat template rewrites earlier turns")
    _print(f"{result['rows']} rows; brackets show 95 % confidence intervals over rows")
    _print_table(measuring.table(result))


serving = typer.Typer(no_args_is_help=True, help="Serve a reward model or a judge over HTTP.")
app.add_typer(serving, name="serve")
HostOption = Annotated[str, typer.Option("--host", help="Address to bind to. The default is this machine only.")]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token-env", metavar="NAME", help="Environment variable with the token. Without it, a random one is printed."
    ),
]


@serving.command("reward")
def serve_reward(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FUNCTION",
            help="A reward model (a folder or hub id), or a function: file.py:name or package.module:name.",
        ),
    ],
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8001,
    token_env: TokenOption = None,
    label: Annotated[str | None, typer.Option(callback=_check_text, help="Label of a classifier to score by.")] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Use (score - mean) / std, as stored with the model.")
    ] = False,
    template: TemplateOption = None,
    precision: Annotated[
        Precision, typer.Option(help="bf16 halves the memory of a model, but rounding changes the scores.")
    ] = "float32",
) -> None:
    """Score completions for runs on this or other machines, with a reward model or a function."""
    _check_function_or_model(source)
    from burnish.commands import serve

    token = serve.token_in(token_env)
    service = serve.reward(source, token, label=label, normalize=normalize, template=template, precision=precision)
    serve.run(service, host, port, _print_now, token if token_env is None else None)


@serving.command("judge")
def serve_judge(
    model: ModelArgument,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    token_env: TokenOption = None,
    name: Annotated[
        str | None, typer.Option(callback=_check_text, help="Name of the model in requests. Default: MODEL.")
    ] = None,
    template: TemplateOption = None,
    precision: PrecisionOption = "auto",
) -> None:
    """Answer chat requests in the format of OpenAI, with log-probabilities, for judges and other clients."""
    _check_names(model)
    from burnish.commands import serve

    token = serve.token_in(token_env)
    service = serve.judge(model, token, name=name, template=template, precision=precision)
    serve.run(service, host, port, _print_now, token if token_env is None else None)


@app.command()
def label(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Completions to rank, or prompts with --model. Also the folder of a stage that samples, or the "
            ".sqlite file of a stage that waits for people.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Sample completions of the prompts in FILE from this model.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=2, show_default="4", help="Completions per prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, show_default="1")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, show_default="256")] = None,
    template: TemplateOption = None,
    pairwise: Annotated[bool, typer.Option("--pairwise", help="Show two completions at a time: every pair.")] = False,
    raters: Annotated[
        int | None, typer.Option(min=1, show_default="everyone", help="How many people answer each task; then stop.")
    ] = None,
    database: Annotated[
        Path | None, typer.Option(dir_okay=False, show_default="beside FILE", help="SQLite file with the answers.")
    ] = None,
    export: Annotated[
        Literal["ranking", "preference", "scored"] | None,
        typer.Option("--export", help="Write the answers as rows to --output instead of opening the page."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", dir_okay=False)] = None,
    host: Annotated[str, typer.Option(help="Address to listen at. The default is reachable only from here.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, show_default="any free port")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="For sampling, and for the order of completions.")] = 0,
    precision: PrecisionOption = "auto",
) -> None:
    """Open a local page where people rank completions, and export their answers."""
    from burnish.commands import label as labeling

    if (export is None) != (output is None):
        raise UserError("--export and --output belong together: --export preference --output pairs.jsonl")
    if output is not None and os.path.realpath(source) == os.path.realpath(output):
        raise UserError("--output would overwrite FILE: choose another file")
    of_page = {"--raters": raters is not None, "--host": host != "127.0.0.1", "--port": port != 0}
    if export is not None and (unused := [flag for flag, given in of_page.items() if given]):
        raise UserError(f"{', '.join(unused)} would have no effect with --export, which opens no page")
    stored = source.suffix == ".sqlite"
    if stored:
        labeling.check_stored(source, {"--database": database, "--model": model, "--pairwise": pairwise})
    where = source if stored else database or labeling.default_database(source)
    sampling = {"samples": samples, "temperature": temperature, "max_new_tokens": max_new_tokens}
    model_only = sampling | {"template": template, "precision": None if precision == "auto" else precision}
    unused = [f"--{name.replace('_', '-')}" for name, value in model_only.items() if value is not None]
    if model is None and unused:
        raise UserError(f"{', '.join(unused)} would have no effect without --model")
    _make_room(output)
    if model is not None:
        _check_names(model, source)
        options = sampling | {"samples": samples or 4, "template": template, "seed": seed, "precision": precision}
        labeling.sample(source, where, pairwise, model, options, _print)
    elif not stored and (export is None or not where.exists()):
        labeling.fill(source, where, pairwise, _print)
    if export is not None and output is not None:
        labeling.export(where, export, output, _print)
    else:
        labeling.show(where, raters, host, port, seed, _print)


@app.command()
def doctor() -> None:
    """Report what this machine supports, and what would make it faster."""
    from burnish.machine import advice, examine
    from burnish.rl.sandbox.client import enforced

    facts = examine() | {f"sandbox: {name}": value for name, value in enforced().items()}
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, value)
    console = _console(soft_wrap=True)
    console.print(table)
    for line in advice(facts):
        console.print(Text.assemble(("advice:", "yellow"), f" {line}"))


def _print_error(message: str) -> None:
    console = _console(stderr=True, soft_wrap=True)
    console.print("error:", style="bold red", end=" ")
    console.print(visible(message))


def _console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that prints text as it is. Brackets and colons in names and rows are not rich's markup and emoji."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


def _check_names(model: str, source: Path | None = None) -> None:
    """Report a mistyped model or file before torch is imported, which takes seconds."""
    from burnish.config.checks import data_problem, model_problem

    if problem := model_problem(model) or (data_problem(str(source)) if source is not None else None):
        raise UserError(problem)


def _check_function_or_model(source: str) -> None:
    """Report a mistyped function or model before torch is imported."""
    from burnish.config.checks import function_problem

    if ":" not in source or Path(source).exists():
        _check_names(source)
    elif problem := function_problem(source, str):
        raise UserError(problem)


def _make_room(output: Path | None) -> None:
    """Create the folder of an output file, so that a failure is reported before any work is done.

    The file is replaced when it is complete. A device or a pipe must not be.
    """
    if output is None:
        return
    if output.exists() and not output.is_file():
        raise UserError(
            f"--output {output}: this is not a regular file, and it would be replaced by one: name another file, or "
            "leave --output out to print the result"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot create its folder: {error.strerror}") from error
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"--output {output}: its folder is not writable")


def _print_table(table: Table) -> None:
    """Print a table. In a file or a pipe it is as wide as its longest row, so that no cell is wrapped."""
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    console.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    with console.capture() as capture:
        console.print(table)
    _print(*(line.rstrip() or " " for line in capture.get().splitlines()))


def _print(*lines: str) -> None:
    for line in lines:
        if line:
            typer.echo(line, color=True)  # without this, escape codes are removed from what goes to a file


def _print_now(*lines: str) -> None:
    """Print lines at once, also into a pipe."""
    _print(*lines)
    sys.stdout.flush()


def main() -> None:
    """Entry point of the command ``burnish``."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        app()
        return
    from burnish.config.processes import end_now

    try:
        app()
    except SystemExit as end:
        end_now(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        end_now(1)
