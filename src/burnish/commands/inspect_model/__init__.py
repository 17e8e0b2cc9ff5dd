"""Shows what a model is and computes: its class, parameters, head, special tokens, pooled position and template.

The weights are loaded only to compare the scores of a small classifier. Everything else comes from the config, from the
tokenizer, from the headers of the weight files, and from the model's class on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burnish.commands.inspect_model.adapter import open_adapter
from burnish.commands.inspect_model.architecture import describe_model
from burnish.commands.inspect_model.description import Description
from burnish.commands.inspect_model.head import describe_head
from burnish.commands.inspect_model.opening import locate, model_file, open_gguf, open_model
from burnish.commands.inspect_model.parameters import describe_parameters
from burnish.commands.inspect_model.score_position import describe_score_position
from burnish.commands.inspect_model.special_tokens import describe_special_tokens, load_tokenizer
from burnish.commands.inspect_model.template import describe_template
from burnish.terminal import visible


def show(reference: str, console: Console) -> None:
    """Print the description of a model.

    Raises:
        UserError: it is not a model, or its config cannot be read.
    """
    described = describe(reference)
    for section, facts in described.facts.items():
        console.print(section, style="bold")
        console.print(_table(facts) if console.is_terminal else _lines(facts), soft_wrap=not console.is_terminal)
    for warning in described.warnings:
        console.print(Text(visible(f"warning: {warning}"), "yellow"), soft_wrap=True)


def _table(facts: Mapping[str, str]) -> Table:
    """Facts in two columns. A long fact continues below its beginning."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(Text(visible(f"  {name}")), Text(visible(fact)))
    return table


def _lines(facts: Mapping[str, str]) -> Text:
    """Facts in aligned lines of any width, for files and pipes."""
    width = max(map(len, facts))
    return Text("\n".join(visible(f"  {name:{width}}  {fact}") for name, fact in facts.items()))


def describe(reference: str) -> Description:
    """Describe a model without training or running it.

    Args:
        reference: a folder (of a model, an adapter or a stage), a .gguf file or a hub id.

    Raises:
        UserError: it is not a model, or its config cannot be read.
    """
    described = Description()
    place = locate(reference)
    if isinstance(place, Path):
        model = open_gguf(reference, place)
    elif (adapter := model_file(place, "adapter_config.json")) is not None and model_file(place, "config.json") is None:
        model = open_adapter(reference, str(adapter.parent), described)
        if model is None:  # the base is not here
            return described
    else:
        model = open_model(reference, place)
    describe_model(model, described)
    describe_parameters(model, described)
    describe_head(model, described)
    tokenizer = load_tokenizer(model, described)
    if tokenizer is not None:
        describe_special_tokens(model, tokenizer, described)
        template = describe_template(tokenizer, described)
        describe_score_position(model, tokenizer, template, described)
    return described
