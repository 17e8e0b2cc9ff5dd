"""A stand-in for a vLLM server, with the routes of vLLM 0.33: ``with serving(model, tokenizer) as vllm: vllm.url``.

It checks the order of calls as vLLM does, and samples with ``LocalGenerator``, so that its completions are those of the
generator ``local``. Instead of NCCL, it receives weights over gloo.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import peft
import torch
import torch.distributed as dist
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete
from burnish.generate.sampling import Sampling

LIMIT = timedelta(seconds=20)
NAME = "served/model"


def refused(status: int, message: str) -> JSONResponse:
    """An error as vLLM reports it."""
    return JSONResponse({"error": {"message": message, "type": "Error", "param": None, "code": status}}, status)


class FakeVllm:
    """One life of a server: from its start until it dies."""

    def __init__(self, model: Any, tokenizer: Any, *, longest: int = 256, raw: bool = False) -> None:
        self.model, self.tokenizer, self.longest, self.raw = copy.deepcopy(model).eval(), tokenizer, longest, raw
        self.adapters: dict[str, Any] = {}
        self.weights, self.paused, self.updating = "default", False, False
        self.group: Any = None
        self.sampling = threading.Lock()
        self.cached: str | None = None  # the weights of the keys and values in the prefix cache

    # --- sampling -------------------------------------------------------------------------------------------------

    async def models(self, request: HttpRequest) -> Response:
        base = {"id": NAME, "root": NAME, "parent": None, "max_model_len": self.longest}
        adapters = [{"id": name, "root": "", "parent": NAME, "max_model_len": None} for name in self.adapters]
        return JSONResponse({"object": "list", "data": [base, *adapters]})

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await request.json()
        tokens = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.longest})

    async def completions(self, request: HttpRequest) -> Response:
        body = await request.json()
        model = self.model if body["model"] == NAME else self.adapters.get(body["model"])
        if model is None:
            return refused(404, f"The model `{body['model']}` does not exist.")
        if max(body["prompt"]) >= self.model.config.vocab_size:
            return refused(400, f"Token id {max(body['prompt'])} is out of vocabulary")
        if len(body["prompt"]) + body["max_tokens"] > self.longest:
            return refused(400, f"This model's maximum context length is {self.longest} tokens.")
        while self.paused:
            await asyncio.sleep(0.01)
        return JSONResponse(await asyncio.to_thread(self._sample, body, model))

    def _sample(self, body: dict[str, Any], model: Any) -> dict[str, Any]:
        sampling = Sampling(
            max_new_tokens=body["max_tokens"],
            min_new_tokens=body["min_tokens"],
            temperature=body["temperature"],
            top_k=body["top_k"] or None,
            top_p=body["top_p"],
            stop=body["stop"],
        )
        request = Request(tuple(body["prompt"]), body["seed"], sampling, frozenset(body["stop_token_ids"]))
        with self.sampling:
            assert self.cached in (None, self.weights), "sampled with keys and values of earlier weights"
            self.cached = self.weights
            (made,) = complete(LocalGenerator(model, self.tokenizer), [request])
        tokens = made.tokens.tolist()
        logprobs = [-1.0] * len(tokens) if self.raw else made.logprobs.tolist()
        names = [f"token_id:{token}" for token in tokens]
        stopped = made.finish_reason == "stop"
        by_id = tokens[-1] in request.stop_ids
        choice = {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"tokens": names, "token_logprobs": logprobs},
            "finish_reason": "stop" if stopped else "length",
            "stop_reason": (tokens[-1] if by_id else body["stop"][0]) if stopped else None,
            "weight_versions": [{"version": self.weights, "start": 0, "end": len(tokens)}],
        }
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}

    # --- adapters -------------------------------------------------------------------------------------------------

    async def load_adapter(self, request: HttpRequest) -> Response:
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return refused(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        base = copy.deepcopy(self.model)
        self.adapters[body["lora_name"]] = peft.PeftModel.from_pretrained(base, body["lora_path"]).eval()
        return Response("Success")

    async def unload_adapter(self, request: HttpRequest) -> Response:
        body = await request.json()
        if self.adapters.pop(body["lora_name"], None) is None:
            return refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return Response("Success")

    # --- weights --------------------------------------------------------------------------------------------------

    async def pause(self, request: HttpRequest) -> Response:
        assert request.query_params["mode"] == "keep"
        self.paused = True
        return JSONResponse({"status": "paused"})

    async def resume(self, request: HttpRequest) -> Response:
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: HttpRequest) -> Response:
        return JSONResponse({"is_paused": self.paused})

    async def world_size(self, request: HttpRequest) -> Response:
        return JSONResponse({"world_size": 1})

    async def init_transfer(self, request: HttpRequest) -> Response:
        info = (await request.json())["init_info"]
        assert not info.pop("packed")
        self.group = await asyncio.to_thread(gloo_group, info.pop("rank_offset"), **info)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, request: HttpRequest) -> Response:
        if self.updating:
            return refused(500, "Cannot release a trainer connection during a weight update")
        self.group = None
        return JSONResponse({"message": "Weight transfer shut down"})

    async def start_update(self, request: HttpRequest) -> Response:
        if self.updating:
            return refused(500, "start_weight_update called while a weight update is already active.")
        self.updating = True
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: HttpRequest) -> Response:
        if not self.updating:
            return refused(500, "start_weight_update must be called before update_weights.")
        if self.group is None:
            self.updating = False
            return refused(500, "NCCL weight transfer not initialized. Call init_transfer_engine() first.")
        assert self.paused
        await asyncio.to_thread(self._receive, **(await request.json())["update_info"])
        return JSONResponse({"message": "Weights updated"})

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        with self.sampling, torch.no_grad():
            own = dict(self.model.named_parameters())
            for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                broadcast(self.group, tensor)
                own.pop(name).copy_(tensor)
            assert not own, f"the trainer sent no {sorted(own)}"

    async def finish_update(self, request: HttpRequest) -> Response:
        if not self.updating:
            return refused(500, "finish_weight_update called without a matching start_weight_update.")
        self.updating = False
        body = await request.body()
        self.weights = (await request.json())["weight_version"] if body else self.weights
        return JSONResponse({"message": "Weight update finished"})

    async def reset_cache(self, request: HttpRequest) -> Response:
        assert request.query_params["reset_running_requests"] == "true"
        self.cached = None
        return JSONResponse({"success": True})


ROUTES: dict[str, tuple[str, str]] = {
    "/v1/models": ("GET", "models"),
    "/tokenize": ("POST", "tokenize"),
    "/v1/completions": ("POST", "completions"),
    "/v1/load_lora_adapter": ("POST", "load_adapter"),
    "/v1/unload_lora_adapter": ("POST", "unload_adapter"),
    "/pause": ("POST", "pause"),
    "/resume": ("POST", "resume"),
    "/is_paused": ("GET", "is_paused"),
    "/get_world_size": ("GET", "world_size"),
    "/init_weight_transfer_engine": ("POST", "init_transfer"),
    "/shutdown_weight_transfer_engine": ("POST", "shutdown_transfer"),
    "/start_weight_update": ("POST", "start_update"),
    "/update_weights": ("POST", "update"),
    "/finish_weight_update": ("POST", "finish_update"),
    "/reset_prefix_cache": ("POST", "reset_cache"),
}


class Serving:
    """A server that can die and be started again at the same address.

    Attributes:
        calls: the paths that were called, in all lives, without completions and checks of the server's health.
        bodies: the bodies of completion requests.
        dies_at: path of a call, and how many such calls it still answers before it dies.
        comes_back: whether it is started again after it died.
        change: changes the JSON answer to a completion.
        without: routes that it does not have.
        key: the API key.
    """

    def __init__(self, make: Callable[[], FakeVllm]) -> None:
        self.make = make
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.dies_at: tuple[str, int] | None = None
        self.comes_back, self.lives = True, 0
        self.change: Callable[[dict[str, Any]], None] = lambda answer: None
        self.without: set[str] = set()
        self.key: str | None = None
        self.version = "0.33.0"
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start a life, with the weights of the beginning."""
        self.vllm = self.make()
        self.lives += 1
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", self._port))
        self._port = bound.getsockname()[1]
        routes = [Route(path, self._answer, methods=[method]) for path, (method, _) in ROUTES.items()]
        routes += [Route("/health", self._health), Route("/version", self._version)]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        self._thread.start()
        while not server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        """End this life."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _health(self, request: HttpRequest) -> Response:
        return Response()

    async def _version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": self.version})

    async def _answer(self, request: HttpRequest) -> Response:
        path = request.url.path
        if self.key and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if path in self.without:
            return JSONResponse({"detail": "Not Found"}, 404)
        if path == "/v1/completions":
            self.bodies.append(await request.json())
        else:
            self.calls.append(path)
        if self.dies_at is not None and self.dies_at[0] == path:
            self.dies_at = (path, self.dies_at[1] - 1) if self.dies_at[1] else None
            if self.dies_at is None:
                self._die()
                await asyncio.sleep(60)
        answer = await getattr(self.vllm, ROUTES[path][1])(request)
        if path == "/v1/completions" and answer.status_code == 200:
            content = json.loads(answer.body)
            self.change(content)
            return JSONResponse(content)
        return answer

    def _die(self) -> None:
        """Break all connections and stop listening, as a killed process does."""
        self.vllm.group = None
        for listening in self._server.servers:
            listening.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        if self.comes_back:
            threading.Thread(target=self._revive, args=(self._thread,), daemon=True).start()

    def _revive(self, dead: threading.Thread) -> None:
        dead.join()
        self.start()


@contextmanager
def serving(model: Any, tokenizer: Any, **settings: Any) -> Iterator[Serving]:
    """Serve a copy of a model."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    served = Serving(lambda: FakeVllm(model, tokenizer, **settings))
    try:
        yield served
    finally:
        served.stop()


# --- instead of NCCL ----------------------------------------------------------------------------------------------


def gloo_group(rank: int, world_size: int, master_address: str, master_port: int) -> Any:
    """Join a group over gloo."""
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        master_address, master_port, is_master=False, wait_for_workers=False, timeout=LIMIT
    )
    return dist.ProcessGroupGloo(store, rank, world_size, LIMIT)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Broadcast from rank 0 and wait."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


class GlooBroadcast:
    """The trainer's end of the group."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT
        )
        self.group: Any = None

    def invitation(self) -> dict[str, object]:
        return {"master_address": "127.0.0.1", "master_port": self.store.port}

    def join(self, size: int) -> None:
        self.group = dist.ProcessGroupGloo(self.store, 0, size, LIMIT)

    def send(self, tensor: torch.Tensor) -> None:
        broadcast(self.group, tensor)

    def end(self) -> None:
        self.group = None
