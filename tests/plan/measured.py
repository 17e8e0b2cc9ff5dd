"""Recipes whose memory is measured, with a random model of 32 M parameters; and the measurement."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from builders import character_tokenizer, llama
from burnish.config import load
from burnish.plan.stage import CPU_RESERVED, plan_stage, this_machine

RECIPES = {
    "sft": "method: {name: sft}\ndata: {train: chat.jsonl}\ntrainer: {per_device_train_batch_size: 16, max_steps: 3}",
    "lora": "method: {name: sft}\nadapter: {r: 16}\ndata: {train: chat.jsonl}\n"
    "trainer: {per_device_train_batch_size: 16, max_steps: 3}",
    "ppo": "method: {name: ppo, epochs: 1, mini_batches: 2}\ndata: {train: prompts.jsonl}\n"
    "reward: [{function: 'my_reward.py:score'}]\ngeneration: {max_new_tokens: 48}\n"
    "trainer: {per_device_train_batch_size: 16, max_steps: 4}",
    "dpo": "method: {name: dpo}\ndata: {train: pairs.jsonl}\ntrainer: {per_device_train_batch_size: 8, max_steps: 3}",
    "reward": "method: {name: reward}\ndata: {train: pairs.jsonl}\ntoken_budget: 1024\n"
    "trainer: {per_device_train_batch_size: 8, max_steps: 3}",
}


def write(folder: Path) -> None:
    """Write the recipes, the model and the rows."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 16000}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = llama(**sizes, max_position_embeddings=1024, initializer_range=0.02, tie_word_embeddings=True)
    model.save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = [("a" * draw.randrange(20, 60), *(letter * draw.randrange(60, 200) for letter in "bc")) for _ in range(48)]
    rows = {
        "chat": [{"prompt": p, "completion": c} for p, c, _ in texts],
        "pairs": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in texts[:24]],
        "prompts": [{"prompt": f"{p}{i}"} for i, (p, *_) in enumerate(texts[:16])],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "my_reward.py").write_text("def score(trajectories): return [float(len(t.text)) for t in trajectories]\n")
    for name, recipe in RECIPES.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\nmodel: model\n{recipe}\n")


def measured_and_planned(name: str, folder: Path) -> tuple[int, int]:
    """The bytes that a recipe takes and those that are planned, in the folder, without what a process takes anyway."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, Path(__file__).with_name("measured_job.py"), f"{name}.yaml"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.splitlines()[-1])
    recipe = load(f"{name}.yaml")
    return peak - CPU_RESERVED, plan_stage(recipe, recipe.stages[0], this_machine(recipe)).memory.peak - CPU_RESERVED
