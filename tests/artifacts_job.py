"""Logits of saved folders by transformers and peft alone: ``artifacts_job.py FOLDER ...`` prints them as JSON."""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers as hf

TOKENS = torch.tensor([[1, 5, 9, 14, 6]])
TASKS = {
    "CAUSAL_LM": (hf.AutoModelForCausalLM, peft.AutoPeftModelForCausalLM, {}),
    "SEQ_CLS": (
        hf.AutoModelForSequenceClassification,
        peft.AutoPeftModelForSequenceClassification,
        {"num_labels": 1},
    ),
}
ARCHITECTURES = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}


def logits(folder: Path) -> list[float]:
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        _, load, settings = TASKS[json.loads(adapter.read_text())["task_type"]]
        model = load.from_pretrained(str(folder), **settings)
    else:
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
        task = next(task for end, task in ARCHITECTURES.items() if name.endswith(end))
        model, info = TASKS[task][0].from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
    hf.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits.flatten().tolist()


if __name__ == "__main__":
    found = {name: logits(Path(name)) for name in sys.argv[1:]}
    assert "burnish" not in sys.modules
    print(json.dumps(found))
