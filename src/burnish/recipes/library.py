"""English prose that every Python carries: its language reference, and the docstrings of its standard library.

A tokenizer of byte pairs and a Llama of 1.3 million random weights are made to go with it. What is written depends on
the version of Python.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import random_llama

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHORTEST = 200  # characters: a docstring below is a line that says little


def prepare(folder: Path, seed: int, *, held_out: int = 10, docstrings: int = 1000, vocabulary: int = 2048) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed and Python write the same bytes.

    Args:
        folder: where to write.
        seed: of what is held out, and of the weights.
        held_out: sections of the language reference that no training file has.
        docstrings: the most docstrings to write.
        vocabulary: tokens of the tokenizer, which is made from the training files.

    Raises:
        UserError: nothing would be left to train on.
    """
    rng = random.Random(seed)
    sections = reference()
    if not 0 < held_out < len(sections):
        raise UserError(f"held_out: expected 1 to {len(sections) - 1} of the {len(sections)} sections, got {held_out}")
    rng.shuffle(sections)
    found = list(dict.fromkeys(documented()))
    rng.shuffle(found)
    training = sections[held_out:], found[:docstrings]
    for name, texts in zip(
        ("reference", "docstrings", "reference-eval"), (*training, sections[:held_out]), strict=True
    ):
        write_rows(folder / "data" / f"{name}.jsonl", ({"text": text} for text in texts))
    tokenizer = make_tokenizer([*training[0], *training[1]], vocabulary)
    tokenizer.save_pretrained(folder / "model")
    model = random_llama(tokenizer, seed, hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    model.save_pretrained(folder / "model")


def reference() -> list[str]:
    """The sections of the language reference that ``help()`` shows, in the order of their names."""
    from pydoc_data.topics import topics

    return list(dict.fromkeys(topics[name].strip() for name in sorted(topics)))


def documented() -> Iterator[str]:
    """The docstrings of the modules of the standard library, and of their classes and functions."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the library's own code
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= SHORTEST:
                    yield text


def make_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte pairs of these texts, with a pad and an eos token of their own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=1024
    )
