"""Trains an adapter with dropout, in as many processes as there are; run by test_processes.py.

``python -m torch.distributed.run --nproc-per-node 2 resume_job.py KIND OUT [CHECKPOINT]`` saves the weights in
OUT/end.pt. KIND is rows, stream (pre-training on text that is read during the run) or kto.
"""

import os
import string
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

from burnish import DPO, SFT, Pretrain, Trainer
from burnish.data.readers import read
from burnish.data.streaming import RowStream, Source
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.render.templates import set_template
from burnish.render.truncate import Truncation
from burnish.types import Text

ROWS = [{"prompt": f"{i} + 1", "completion": "x" * (1 + i % 5) + str(i * 7)} for i in range(12)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": f"no{i}"} for i, row in enumerate(ROWS)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    words = {token: number for number, token in enumerate(["<end>", "<unk>", *string.printable])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>", unk_token="<unk>")
    set_template(made, "question_answer")
    return made


def llama(**settings: Any) -> LlamaForCausalLM:
    """A Llama of one layer, for ``tokenizer()``."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 102, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, pad_token_id=0, **settings))


def stream() -> RowStream:
    """Texts of 1 to 13 characters, seven of which are shuffled at a time."""
    texts = [{"text": "y" * (1 + 5 * i % 13)} for i in range(12)]
    return RowStream([Source("texts", lambda: read(texts, (Text,)))], shuffle_buffer=7)


def main(kind: str, out: str, start: str | None) -> None:
    """Train to the end."""
    adapted = add_adapter(llama(), AdapterConfig.model_validate({"r": 4, "dropout": 0.3}), "CAUSAL_LM")
    trainer = Trainer(
        model=adapted,
        args=TrainingArguments(
            out,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="steps",
            save_steps=1,
            per_device_train_batch_size=3,
            num_train_epochs=2,
            max_steps=-1 if kind == "rows" else 8,
            learning_rate=1e-2,
            neftune_noise_alpha=5 if kind == "rows" else None,
            ddp_backend="gloo" if "RANK" in os.environ else None,
        ),
        method={"rows": SFT(), "stream": Pretrain(), "kto": DPO(loss="kto")}[kind],
        train_dataset={"rows": ROWS, "stream": stream(), "kto": PAIRS}[kind],
        truncation=Truncation(max_length=6 if kind == "stream" else None),
        processing_class=tokenizer(),
        token_budget=60,
    )
    trainer.train(resume_from_checkpoint=start)
    if trainer.is_world_process_zero():
        torch.save(trainer.network.state_dict(), Path(out) / "end.pt")
    trainer.accelerator.wait_for_everyone()
    # exit without destroying gloo: its destructor holds the interpreter lock and may wait for a thread that needs it
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
