"""English prose that comes with Python: its language reference and the docstrings of its standard library.

The recipe also trains a BPE tokenizer and creates a Llama with 1.3 million random weights. The texts depend on the
version of Python.
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

SHORTEST = 200
"""Minimum length of a docstring in characters. Shorter ones are single lines with little content."""


def prepare(folder: Path, seed: int, *, held_out: int = 10, docstrings: int = 1000, vocabulary: int = 2048) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed and Python write the same bytes.

    Args:
        folder: where to write.
        seed: seed of the split and the weights.
        held_out: number of sections of the language reference that are in no training file.
        docstrings: maximum number of docstrings.
        vocabulary: vocabulary size of the tokenizer, which is trained on the training files.

    Raises:
        UserError: if nothing would be left to train on.
    """
    rng = random.Random(seed)
    sections = reference_sections()
    if not 0 < held_out < len(sections):
        raise UserError(f"held_out: expected 1 to {len(sections) - 1} of the {len(sections)} sections, got {held_out}")
    rng.shuffle(sections)
    documentation = list(dict.fromkeys(standard_library_docstrings()))
    rng.shuffle(documentation)
    training = sections[held_out:], documentation[:docstrings]
    for name, texts in zip(
        ("reference", "docstrings", "reference-eval"), (*training, sections[:held_out]), strict=True
    ):
        write_rows(folder / "data" / f"{name}.jsonl", ({"text": text} for text in texts))
    tokenizer = train_tokenizer([*training[0], *training[1]], vocabulary)
    tokenizer.save_pretrained(folder / "model")
    model = random_llama(tokenizer, seed, hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    model.save_pretrained(folder / "model")


def reference_sections() -> list[str]:
    """The sections of the language reference that ``help()`` shows, sorted by name."""
    from pydoc_data.topics import topics

    return list(dict.fromkeys(topics[name].strip() for name in sorted(topics)))


def standard_library_docstrings() -> Iterator[str]:
    """The docstrings of the standard library's modules, classes and functions."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the library's own code
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= SHORTEST:
                    yield text


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a pad and an EOS token."""
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
