"""Files of models that are damaged, foreign or impossible: one message, before memory is taken or code runs."""

from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from burnish.errors import UserError, is_out_of_memory
from burnish.models import loading
from burnish.models.limits import limits_of
from burnish.terminal import visible
from hostile import examples, try_all


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


class Runs:
    """A pickle of this object runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def setting(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def weights(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        make(folder / "pytorch_model.bin")

    return change


def cut(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a config that is a list": (text("config.json", "[]"), "config.json: expected a JSON object, got []"),
    "an empty config": (text("config.json", ""), "config.json: not valid JSON"),
    "a nested config": (text("config.json", "[" * 100_000), "config.json: not valid JSON"),
    "text for a size": (setting(hidden_size="x"), "hidden_size"),
    "no layers": (setting(num_hidden_layers=0), "config.json: num_hidden_layers: expected 1 or more, got 0"),
    "negative layers": (setting(num_hidden_layers=-1), "num_hidden_layers: expected 1 or more, got -1"),
    "no heads": (setting(num_attention_heads=0), "ZeroDivisionError"),
    "no positions": (setting(max_position_embeddings=0), "max_position_embeddings: expected 1 or more, got 0"),
    "far too many layers": (setting(num_hidden_layers=10**6), "its sizes are those of a model with "),
    "a list for each of its layers": (
        setting(num_hidden_layers=10**9),
        "expected at most 1,000,000, got 1,000,000,000",
    ),
    "too many labels": (setting(num_labels=10**12), "num_labels: expected at most 1,000,000, got 1,000,000,000,000"),
    "a length that is text": (
        text("tokenizer_config.json", '{"model_max_length": "x"}'),
        "tokenizer_config.json: model_max_length: expected a number of tokens, got 'x'",
    ),
    "a huge vocabulary": (setting(vocab_size=10**9), "its sizes are those of a model with "),
    "a huge hidden layer": (setting(intermediate_size=10**9), "its sizes are those of a model with "),
    "huge heads": (setting(head_dim=10**8), "its sizes are those of a model with "),
    "a list of tokenizer settings": (text("tokenizer_config.json", "[]"), "tokenizer_config.json: expected a JSON"),
    "a tokenizer that is a list": (text("tokenizer.json", "[]"), "one of its files is damaged (TypeError"),
    "a tokenizer of another kind": (text("tokenizer.json", '{"a": 1}'), "one of its files is damaged (KeyError"),
    "a list of generation settings": (text("generation_config.json", "[]"), "generation_config.json: expected a JSON"),
    "a list of adapter settings": (
        text("adapter_config.json", "[]"),
        "adapter_config.json: expected a JSON object, got",
    ),
    "weights that run code": (
        weights(lambda path: torch.save({"w": Runs(), "x": torch.zeros(99_999)}, path)),
        "pickle that is damaged or holds more than tensors, which could run any code",
    ),
    "an old pickle that runs code": (
        weights(lambda path: path.write_bytes(pickle.dumps([Runs(), "x" * 99_999], protocol=2))),
        "pickle that is damaged or holds more than tensors, which could run any code",
    ),
    "a list of weights": (
        weights(lambda path: torch.save([torch.zeros(99_999)], path)),
        "cannot be loaded as AutoModel",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
    "weights cut in the header": (cut(100), "but its weight files have only 0.1 kB: restore the config or the weights"),
    "weights cut at the end": (cut(-9), "cannot be loaded as AutoModelForCausalLM: Error while deserializing"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_model_is_explained(
    damage: Callable[[Path], None], expected: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    damage(model)
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        loading.load_tokenizer("model")
        loading.load_policy("model")
    assert str(caught.value).startswith(("model: ", "model/"))
    assert expected in str(caught.value)
    assert time.monotonic() - began < 5
    assert not Path("ran").exists()


FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
KEYS = [
    "model_type",
    "architectures",
    "auto_map",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "quantization_config",
    "num_labels",
    "id2label",
    "label2id",
    "problem_type",
    "return_dict",
    "output_hidden_states",
    "use_cache",
    "dtype",
    "is_decoder",
    "is_encoder_decoder",
    "tie_word_embeddings",
    "layer_types",
    "sliding_window",
    "text_config",
    "hidden_act",
    "pad_token_id",
    "eos_token_id",
    "chat_template",
    "model_max_length",
    "tokenizer_class",
    "pad_token",
    "eos_token",
    "added_tokens_decoder",
    "extra_special_tokens",
    "temperature",
    "max_length",
    "cache_implementation",
]
NUMBERS = [-1, 0, 1, 3, 10**6, 10**12, 2**64, 0.5, math.nan, math.inf, 1e308]
TEXTS = [
    "",
    "x",
    "1",
    "\ud800",
    "llama",
    "gpt2",
    "bert",
    "float16",
    "../x",
    "LlamaTokenizer",
    "eager",
    "full_attention",
]
BLOCKS = [[], {}, [None], [[]], ["x"], {"x": 1}, {"rope_type": "yarn"}, {"0": "a"}, {"quant_method": "bitsandbytes"}]


def leaves(value: Any) -> list[tuple[dict[str, Any], str]]:
    """Every key inside of a value, with the object that holds it."""
    found = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += [(value, key)] if isinstance(value, dict) else []
        found += leaves(item)
    return found


@examples(few=40, many=200)
def test_whatever_the_files_of_a_model_hold_it_is_read_or_refused(
    tiny_folder: Path, tmp_path: Path, examples: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    read = 0

    def check(changes: tuple[str, list[tuple[int, str | None, Any]], float | None, bool]) -> None:
        nonlocal read
        name, settings, keep, scores = changes
        shutil.rmtree("model", ignore_errors=True)
        shutil.copytree(tiny_folder, "model")
        value = json.loads(Path("model", name).read_text())
        for number, key, new in settings:
            places = leaves(value)
            holder, place = places[number % len(places)] if key is None else (value, key)
            holder[place] = new
        written = json.dumps(value)
        Path("model", name).write_text(written if keep is None else written[: int(keep * len(written))])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tokenizer = loading.load_tokenizer("model")
                model: Any = loading.load_reward_model("model") if scores else loading.load_policy("model")
                limits_of(model.config, tokenizer)
        except UserError as error:
            assert str(error).startswith("model") and len(str(error)) < 1000, error
            visible(str(error)).encode()
        except (MemoryError, RuntimeError) as error:  # which the command line explains
            assert is_out_of_memory(error)
        else:
            read += 1

    setting = st.tuples(
        st.integers(0, 10**4),
        st.none() | st.none() | st.sampled_from(KEYS),
        st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *BLOCKS]).map(copy.deepcopy),
    )
    inputs = st.tuples(
        st.sampled_from([*FILES, "config.json", "config.json"]),
        st.lists(setting, min_size=1, max_size=2),
        st.sampled_from([None] * 9 + [0.0, 0.5, 0.99]),
        st.booleans(),
    )
    try_all(inputs, check, examples, record_property)
    assert examples // 20 < read < examples


def test_a_pickle_of_tensors_is_read(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    weights(lambda path: torch.save(tensors, path))(model)
    loaded = dict(loading.load_policy(str(model)).named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items() if name in loaded)


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    for content in (b"", b"junk" * 100, b"GGUF" + bytes(100), b"GGUF\x03\0\0\0" + b"\xff" * 100):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.gguf: cannot be read as a GGUF model"):
            loading.resolve(str(tmp_path / "x.gguf"))
