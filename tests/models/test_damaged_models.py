"""Files of models that are damaged, foreign or impossible: one message, before memory is taken or code runs."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.errors import UserError
from burnish.models import loading


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
    "far too many layers": (setting(num_hidden_layers=10**9), "its sizes are those of a model with "),
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
