"""Serves a reward model, a function or a judge over HTTP until it is stopped."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from burnish import user_functions
from burnish.config.inputs import Checksums, of_model
from burnish.errors import UserError
from burnish.files import sha256
from burnish.models import loading
from burnish.models.loaded import is_reward_model, load
from burnish.models.precision import weights_dtype
from burnish.models.settings import Precision
from burnish.render.templates import set_template
from burnish.rewards.functions import TIMEOUT, NamedReward
from burnish.rewards.model import ModelReward
from burnish.rewards.remote import token_of
from burnish.serving.chat import Chat, chat_service
from burnish.serving.http import Service, check_token, is_loopback, listening, new_token
from burnish.serving.reward import reward_service

Say = Callable[..., None]
"""Prints lines."""


def reward(
    source: str,
    token: str,
    *,
    label: str | None = None,
    normalize: bool = False,
    template: str | None = None,
    precision: Precision = "float32",
    timeout: float = TIMEOUT,
) -> Service[Any, Any]:
    """The service of a reward model or of a function, ``file.py:name``.

    Raises:
        UserError: if it cannot be loaded, or an option does not apply to it.
    """
    if is_function(source):
        options = {"--label": label, "--normalize": normalize, "--template": template}
        options["--precision"] = precision != "float32"
        if given := [option for option, value in options.items() if value]:
            raise UserError(f"{', '.join(given)}: only for a model, but {source} is a function")
        place, _, name = source.rpartition(":")
        named = NamedReward(name, 1.0, user_functions.load(source), source, timeout)
        spec = None if place.endswith(".py") else importlib.util.find_spec(place)
        file = Path(place if spec is None else spec.origin or "")
        return reward_service(named, token, digest=_digest(sha256(file) if file.is_file() else "", name))
    if not is_reward_model(source):
        raise UserError(f"{source} is a language model, which gives no score: use burnish serve judge {source}")
    tokenizer = loading.load_tokenizer(source)
    if template is not None:
        set_template(tokenizer, template)
    chosen = weights_dtype(precision, loading.width(source))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = loading.load_reward_model(source, labels=None, dtype=chosen).to(device)
    of_label = int(label) if label is not None and label.isdecimal() else label
    scorer = ModelReward(model, tokenizer, label=of_label, normalize=normalize)
    digest = _digest(_of_files(source), scorer.label, normalize, template, str(chosen))
    # in fewer bits, rounding would change scores by more than 1e-6
    return reward_service(NamedReward(source, 1.0, scorer), token, digest=digest, joins=chosen == torch.float32)


def judge(
    source: str, token: str, *, name: str | None = None, template: str | None = None, precision: Precision = "auto"
) -> Service[Any, Any]:
    """The service of a language model, in the format of OpenAI's chat completions.

    Raises:
        UserError: if it cannot be loaded, or is a reward model.
    """
    if is_reward_model(source):
        raise UserError(f"{source} is a reward model, which writes no text: use burnish serve reward {source}")
    return chat_service(Chat(load(source, template, precision), name or source), token)


def is_function(source: str) -> bool:
    """Whether the user named a function, ``file.py:name`` or ``package.module:name``, and not a model."""
    return ":" in source and not Path(source).exists()


def token_in(variable: str | None) -> str:
    """The token in an environment variable, or a new one without a variable.

    Raises:
        UserError: if the variable is not set, or its token is too short.
    """
    if variable is None:
        return new_token()
    token = token_of(variable, "--token-env")
    assert token is not None
    check_token(token, f"--token-env: the token in {variable}")
    return token


def run(service: Service[Any, Any], host: str, port: int, say: Say, token: str | None) -> None:
    """Listen, and answer requests until Ctrl-C or SIGTERM. Requests in progress are answered first.

    Args:
        service: what to serve.
        host: the name or IP address to bind to.
        port: the port; 0 picks a free one.
        say: prints lines.
        token: the token to print; None if the user already has it.

    Raises:
        UserError: if the address is in use or does not exist on this machine.
    """
    with _stopping(service), listening(service.app, host, port) as url:
        say(f"listening on {url} (Ctrl-C stops)")
        if token is not None:
            say(f"token: {token}")
        if not is_loopback(host):
            say("the connection is not encrypted: other machines can read it; prefer an SSH tunnel")
        service.worker.run()
    say("stopped")


@contextmanager
def _stopping(service: Service[Any, Any]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the worker. A second Ctrl-C interrupts it."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        service.worker.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _of_files(source: str) -> str:
    """The checksums of a model's files, whatever folder they are in."""
    sums = of_model(source, Path(), Checksums({}))
    return json.dumps(sorted((Path(name).name, checksum) for name, checksum in sums.items()))


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
