"""What a stage of a recipe needs: its models, its micro-batches, and what it samples, as its settings say."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.config import Recipe, Stage, StageData, method_spec, sources
from burnish.config.resolve import environments_of
from burnish.config.row_stage import CHUNK, RowStage
from burnish.config.schema import RewardFromModel, any_spec
from burnish.data import readers
from burnish.generate.kv_cache import BLOCK
from burnish.generate.local import most_copied_bytes
from burnish.generate.session import PREFILL_TOKENS
from burnish.generate.settings import CLASSES
from burnish.kernels import blocked, grouped, linear
from burnish.machine import memory_bytes
from burnish.methods.dpo import DPO
from burnish.methods.settings import PolicyGradientConfig
from burnish.mistakes import Keys
from burnish.models.forward import layers_of, unwrap
from burnish.models.heads import Network
from burnish.models.layout import default_budget
from burnish.models.limits import Limits, limits_of
from burnish.models.precision import autocast_dtype, resolve, width_of
from burnish.models.settings import ModelSource, Precision
from burnish.plan.activations import PassSettings, cache_bytes, can_pack, checkpointed_bytes, kept_bytes
from burnish.plan.memory import FLOAT32, Memory, ModelSize, Needs, Sampling, logits_bytes, memory
from burnish.plan.micro_batches import Lengths, MicroBatch, largest, lengths_of
from burnish.plan.models import (
    method_of,
    network_of,
    reference_of,
    tokenizer_of,
    without_weights,
)
from burnish.plan.sizes import model_size
from burnish.protocols import Method
from burnish.render.renderer import Renderer
from burnish.rl.collect import with_tools
from burnish.training.engine import sampling_dtype
from burnish.types import Example, Preference, Prompt, Ranking
from burnish.types import Sequence as TokenSequence

CUDA_RESERVED = 2**30
"""Bytes that a process takes of a GPU besides tensors: CUDA's context and kernels, workspaces, and NCCL's buffers."""
CPU_RESERVED = 560 * 10**6
"""Bytes that a process on a CPU takes besides tensors: Python, its packages, and oneDNN's kernels. A run with a
model of 26,000 parameters took as much."""
DECODED = 4
"""Copies of the logits of a decoding step: those of the head, of the sampling distribution, and to draw from it."""


@dataclass(frozen=True)
class Machine:
    """The devices of a run: ``Machine(processes=8, memory=80 * 2**30, gpu=True, reserved=CUDA_RESERVED)``."""

    processes: int
    """Number of processes, one per device."""
    memory: int
    """Bytes for each process."""
    gpu: bool
    """Whether the devices are GPUs; otherwise the processes share a CPU."""
    reserved: int
    """Bytes that a process takes before it loads a model."""


def this_machine(recipe: Recipe) -> Machine:
    """The machine that this process runs on: its GPUs, or its CPU, which all processes share."""
    processes = recipe.parallel.processes
    if torch.cuda.is_available():
        return Machine(processes, torch.cuda.get_device_properties(0).total_memory, True, CUDA_RESERVED)
    return Machine(processes, memory_bytes() // processes, False, CPU_RESERVED)


@dataclass(frozen=True)
class StagePlan:
    """What one process of a stage needs: ``StagePlan("ppo", needs, lengths, batch)``."""

    stage: str
    needs: Needs
    lengths: Lengths | None
    """The rows; None if the stage neither trains nor samples."""
    batch: MicroBatch | None
    """The largest micro-batch; None if the stage does not train."""

    @property
    def memory(self) -> Memory:
        """The memory of a process."""
        return memory(self.needs)


def plan_stage(
    recipe: Recipe, stage: Stage, machine: Machine, row_tokens: int | None = None, lengths: Lengths | None = None
) -> StagePlan:
    """The needs of a stage with a method.

    Args:
        recipe: the recipe.
        stage: the stage.
        machine: the devices.
        row_tokens: the length of rows that do not exist yet, with their completions; by default, as long as possible.
        lengths: the lengths of the rows; by default, the rows are read.

    Raises:
        NotMadeYet: if a function of the recipe will make one of its models.
        UserError: if a model, a tokenizer or rows cannot be read.
    """
    plan = _row_stage if stage.makes_rows else _training
    return plan(recipe, stage, machine, row_tokens, lengths)


# --- training -----------------------------------------------------------------------------------------------------


def _training(
    recipe: Recipe, stage: Stage, machine: Machine, row_tokens: int | None, lengths: Lengths | None
) -> StagePlan:
    assert stage.method is not None
    tokenizer = tokenizer_of(recipe, stage)
    method = method_of(recipe, stage, machine.gpu)
    network = network_of(recipe, stage, method, tokenizer, machine.gpu)
    trainer, samples = stage.trainer, stage.generation.samples
    settings = any_spec(stage.method.name).config(**stage.method.settings)
    limits = limits_of(unwrap(network.policy).config, tokenizer)
    if lengths is None:
        lengths = training_lengths(recipe, stage, method, tokenizer, limits, row_tokens)
    rows = trainer.per_device_train_batch_size * (samples if lengths.prompt else 1)
    if isinstance(settings, PolicyGradientConfig):
        rows //= settings.mini_batches if lengths.prompt else 1
    budget = stage.token_budget or default_budget(torch.device("cuda" if machine.gpu else "cpu"))
    batch = largest(lengths, max(rows, 1), budget, machine.processes, samples if lengths.prompt else 1)
    sharded = recipe.parallel.shard == "fsdp2" and machine.processes > 1
    trained = tuple(_trained(stage, network))
    kept, casts = _passes(stage, network, batch, lengths.longest, machine, sharded)
    half = _autocast(stage, network.policy, machine) is not None and unwrap(network.policy).dtype == torch.float32
    needs = Needs(
        trained=trained,
        whole=tuple(_rewards(recipe, stage, machine.gpu)),
        logits=_logits(stage, method, network, batch, machine),
        micro_batches=batch.count,
        processes=machine.processes,
        sharded=sharded,
        gathered=0.5 if half else 1.0,
        reserved=machine.reserved,
        activations=kept,
        casts=casts,
        merged=_merged(stage, network.policy, machine, sharded),
    )
    needs = replace(needs, frozen=tuple(_frozen(method, network, needs, machine)))
    if lengths.prompt:
        wanted = trainer.per_device_train_batch_size * samples
        sampling = _sampling(stage, network.policy, trained[0], wanted, lengths, machine, sharded)
        needs = replace(needs, sampling=sampling)
    return StagePlan(stage.name, needs, lengths, batch)


def _trained(stage: Stage, network: Network) -> Iterator[ModelSize]:
    """The policy, with a head on it, and a separate critic."""
    quantized = stage.adapter.quantize if stage.adapter else None
    for name, model in zip(("policy", "critic"), network.models, strict=False):
        heads = network.heads if model is network.policy else []
        options: dict[str, Any] = {"optimizer": stage.trainer.optim, "arguments": stage.trainer.optim_args}
        yield model_size(name, model, heads=heads, quantized=quantized, **options)


def _frozen(method: Method, network: Network, needs: Needs, machine: Machine) -> Iterator[ModelSize]:
    """The reference and models that read the same micro-batches.

    Log-probabilities of the reference that are computed once need it on the GPU only before training.
    """
    for model in network.frozen:
        yield model_size("teacher", model)
    reference = reference_of(method)
    if reference is None or reference.frozen is None:
        return
    once = isinstance(method, DPO) and method.settings.reference == "precomputed"
    if not (once and machine.gpu and not needs.sharded):
        yield model_size("reference", reference.frozen)


def _rewards(recipe: Recipe, stage: Stage, gpu: bool) -> Iterator[ModelSize]:
    """Reward models and judges, which every process loads."""
    for keys, source in stage.models.items():
        if keys[0] == "reward":
            yield _other(recipe, stage, source, _role(keys), gpu)


def _role(keys: Keys) -> str:
    """What a model is for, by the keys that name it."""
    if keys[0] == "model":
        return "policy"
    if "judge" in keys:
        return "judge"
    return "reward model" if keys[0] == "reward" else str(keys[-1])


def _other(recipe: Recipe, stage: Stage, source: ModelSource, role: str, gpu: bool) -> ModelSize:
    """The sizes of a model that is not trained."""
    rewards = [r for r in stage.reward if isinstance(r, RewardFromModel) and r.model == source]
    if role != "reward model":
        rewards = []
    precision: Precision = rewards[0].precision if rewards else stage.precision
    task = "SEQ_CLS" if rewards and rewards[0].steps is None else "CAUSAL_LM"
    return model_size(role, without_weights(recipe, stage, source, precision, gpu, task=task).requires_grad_(False))


def _passes(
    stage: Stage, network: Network, batch: MicroBatch, longest: int, machine: Machine, sharded: bool
) -> tuple[int, int]:
    """The bytes that autograd keeps of the passes of a micro-batch, and those of weights that autocast casts."""
    trainer = stage.trainer
    autocast = _autocast(stage, network.policy, machine)
    settings = _settings(machine.gpu, autocast)
    kept = casts = 0
    for model in network.models:
        if sharded and autocast is not None:
            model = copy.deepcopy(model).to(autocast)  # gathered weights need no cast
        packed = stage.packed is not False and can_pack(model)
        rows, width = (1, batch.tokens) if packed else (-(-batch.tokens // longest), longest)
        cast = kept_bytes(model, 1, 1, settings) if autocast and not sharded else 0
        of_model = kept_bytes(model, rows, width, settings) - cast
        if trainer.activation_checkpointing:
            width = unwrap(model).config.get_text_config().hidden_size * unwrap(model).dtype.itemsize
            layers = len(layers_of(model))
            of_model, cast = checkpointed_bytes(of_model, layers, batch.tokens, width), cast // layers
        kept, casts = kept + of_model, casts + cast
    return kept, casts


def _merged(stage: Stage, model: nn.Module, machine: Machine, sharded: bool) -> int:
    """The model in float32 to which the adapter is added at the end, if it is not in float32 already.

    It is in the memory of the CPU. Sharded models are not counted.
    """
    if machine.gpu or sharded or not isinstance(model, PeftModel):
        return 0
    quantized = stage.adapter is not None and stage.adapter.quantize is not None
    if unwrap(model).dtype == torch.float32 and not quantized:
        return 0
    return FLOAT32 * sum(parameter.numel() for parameter in model.parameters())


def _precision(stage: Stage, model: nn.Module, machine: Machine) -> Precision:
    return resolve(stage.precision, width_of(unwrap(model).config), machine.gpu)


def _autocast(stage: Stage, model: nn.Module, machine: Machine) -> torch.dtype | None:
    """The dtype to which the passes of a stage that trains this model are cast."""
    return autocast_dtype(_precision(stage, model, machine))


def _settings(gpu: bool, autocast: torch.dtype | None = None) -> PassSettings:
    """How passes are computed here."""
    return PassSettings(gpu, autocast, grouped.fits(autocast or torch.float32, torch.device("cpu")))


def _logits(stage: Stage, method: Method, network: Network, batch: MicroBatch, machine: Machine) -> int:
    """What the head needs, for methods of language models."""
    base = unwrap(network.policy)
    head = base.get_output_embeddings()
    if method.spec.task == "SEQ_CLS" or head is None:
        return 0
    item = (_autocast(stage, network.policy, machine) or base.dtype).itemsize
    if stage.generation.temperature != 1.0:
        item = FLOAT32
    trained = head.weight.nbytes if head.weight.requires_grad else 0
    filtered = stage.generation.top_k is not None or stage.generation.top_p is not None
    models = 1 + len(network.frozen)
    return logits_bytes(
        batch.learned, base.config.get_text_config().vocab_size * models, trained, item=item, filtered=filtered
    )


# --- sampling -----------------------------------------------------------------------------------------------------


def _sampling(
    stage: Stage, model: nn.Module, size: ModelSize, wanted: int, lengths: Lengths, machine: Machine, sharded: bool
) -> Sampling:
    """What the stage's generator needs, to decode as many of the wanted completions together as it has slots."""
    generator = stage.generator
    # a copy has the dtype in which it samples
    sampled = sampling_dtype(model, _precision(stage, model, machine))
    share = 1.0 if sampled is None else sampled.itemsize / unwrap(model).dtype.itemsize
    weights = int(share * size.weights)
    copy = weights if sharded or sampled is not None else 0
    if generator.name == "process":
        copy += weights + size.trained + machine.reserved
    if generator.name in ("vllm", "ray"):  # their weights and caches are elsewhere
        return Sampling(0, 0, copy)
    options = inspect.signature(_class(CLASSES[generator.name])).parameters
    slots = generator.slots or options["slots"].default
    together = min(slots, -(-wanted // machine.processes))
    columns = BLOCK * -(-lengths.longest // BLOCK)
    if generator.name == "continuous":
        page = generator.page_size or options["page_size"].default
        columns = page * (-(-lengths.longest // page) + 1)
    read = max(1, min(PREFILL_TOKENS, together * lengths.prompt))
    prompts = kept_bytes(model, 1, read, _settings(machine.gpu)) // max(1, len(layers_of(model)))
    logits = DECODED * FLOAT32 * together * unwrap(model).config.get_text_config().vocab_size
    cache = int(share * together * columns * cache_bytes(model))
    copies = _blocked(stage, model, share, machine)
    if generator.name == "process":  # which keeps them during updates
        return Sampling(cache, max(logits, prompts), copy + copies)
    return Sampling(cache, max(logits, prompts), copy, copies)


def _blocked(stage: Stage, model: nn.Module, share: float, machine: Machine) -> int:
    """The copies of linear weights with which ``local`` samples, also in the process of ``process``.

    ``share`` is the size of a weight in the dtype of sampling over that in the model's own. Of a quantized model, only
    the head is copied.
    """
    if machine.gpu or stage.generator.name not in ("local", "process") or not linear.has_onednn():
        return 0
    quantized = stage.adapter is not None and stage.adapter.quantize is not None
    needed = int(share * blocked.bytes_of(unwrap(model).get_output_embeddings() if quantized else model))
    return needed if needed <= most_copied_bytes(machine.processes) else 0


def _class(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _row_stage(
    recipe: Recipe, stage: Stage, machine: Machine, row_tokens: int | None, lengths: Lengths | None
) -> StagePlan:
    """The needs of a stage that makes rows, which runs in one process."""
    assert stage.method is not None and stage.data is not None
    machine = replace(machine, processes=1)
    found: list[ModelSize] = []
    sampling = None
    spec = any_spec(stage.method.name)
    for (key, *rest), source in stage.models.items():
        if key == "model" and stage.method.name == "score":
            continue  # only its tokenizer is used
        found.append(_other(recipe, stage, source, _role((key, *rest)), machine.gpu))
    if stage.model is not None and "generation" in getattr(spec, "takes", ()):
        model = without_weights(recipe, stage, stage.model, stage.precision, machine.gpu)
        tokenizer = tokenizer_of(recipe, stage)
        if lengths is None:
            lengths = row_lengths(recipe, stage, tokenizer, limits_of(unwrap(model).config, tokenizer), row_tokens)
        wanted = CHUNK * stage.generation.samples
        sampling = _sampling(stage, model, found[0], wanted, lengths, machine, sharded=False)
    needs = Needs(whole=tuple(found), sampling=sampling, reserved=machine.reserved)
    return StagePlan(stage.name, needs, lengths, None)


# --- rows ---------------------------------------------------------------------------------------------------------


def sampled_tokens(stage: Stage, prompts: bool) -> int:
    """The most tokens that can follow a prompt, if nothing else limits an episode; 0 if the rows are no prompts."""
    limits, turn = stage.environment, stage.generation.longest
    if stage.acts:
        episode = limits.max_turns * turn + (limits.max_turns - 1) * limits.max_tool_tokens
        return min(episode, limits.max_tokens or episode)
    return turn if prompts else 0


def rows_missing(recipe: Recipe, stage: Stage) -> str | None:
    """The first file that an earlier stage has to write before this stage's rows can be read, or None."""
    assert stage.data is not None
    for part in (part for split in stage.data.splits for part in stage.data.parts(split)):
        place = sources.data_reference(part.source, recipe.folder)
        if isinstance(part.source, StageData) and not Path(place).exists():
            return place
    return None


def training_lengths(
    recipe: Recipe,
    stage: Stage,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    row_tokens: int | None = None,
) -> Lengths:
    """The lengths of a stage's training rows, or the longest that its settings allow."""
    assert stage.data is not None and stage.method is not None
    spec = method_spec(stage.method.name)
    if rows_missing(recipe, stage):
        count = 2 if set(spec.kinds) & {Preference, Ranking} else 1
        return _assumed(stage, limits, row_tokens, prompts=Prompt in spec.kinds, sequences=count)
    if stage.data.stream:
        stream = sources.stream(stage.data, recipe.folder, spec.kinds)
        read = readers.Rows(*stream.take(stage.data.shuffle_buffer))
    else:
        read = sources.read(stage.data, "train", recipe.folder, spec.kinds, recipe.seed_of(stage))
    length = limits.default(stage.data.length, read.rows, spec.too_long)
    examples = method.examples(read.rows, tokenizer, length).examples
    prompts = any(example.row is not None for example in examples)
    return lengths_of(examples, sampled_tokens(stage, prompts), stage.packed is not False)


def row_lengths(
    recipe: Recipe, stage: Stage, tokenizer: PreTrainedTokenizerBase, limits: Limits, row_tokens: int | None = None
) -> Lengths:
    """The lengths of the prompts of a stage that samples, with their completions."""
    if rows_missing(recipe, stage):
        return _assumed(stage, limits, row_tokens, prompts=True)
    rows = RowStage(recipe, stage).read().rows
    prompts = [row for row in rows if isinstance(row, Prompt)]
    if not prompts:
        return _assumed(stage, limits, row_tokens, prompts=True)
    environments = environments_of(stage, recipe.locate)
    ids = Renderer(tokenizer).prompts(with_tools(prompts, environments, tokenizer))
    examples = [
        Example((TokenSequence(one, [False] * len(one), p.source),)) for p, one in zip(prompts, ids, strict=True)
    ]
    return lengths_of(examples, sampled_tokens(stage, True), packed=True)


def _assumed(stage: Stage, limits: Limits, row_tokens: int | None, *, prompts: bool, sequences: int = 1) -> Lengths:
    """The longest rows that the settings and the model allow."""
    assert stage.data is not None
    longest = min(size for size in (row_tokens, stage.data.max_length, limits.longest, NO_LIMIT) if size is not None)
    sampled = min(sampled_tokens(stage, prompts), longest - 1)
    share = sampled / longest if prompts else 1.0
    return Lengths((sequences * longest,) * ENOUGH, longest, share, longest - sampled if prompts else 0, known=False)


NO_LIMIT = 8192
"""Tokens that are assumed for rows of unknown length of a model that reads any length."""
ENOUGH = 4096
"""More rows than an optimizer step has."""
