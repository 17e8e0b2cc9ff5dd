"""Hub ids work without a network if their files are in the hub's cache. Missing files are reported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.models.bases import weights_hash

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"prompt": "12+30", "completion": "42"}, {"prompt": "5+5", "completion": "10"}]
JOB = """
import json, sys, warnings
from pathlib import Path
import torch
from burnish.data.readers import load
from burnish.models.merge import merge
from burnish.models import loading
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.models.heads import Network
from burnish.errors import UserError
from burnish.types import Conversation

def refused(function, *arguments):
    try:
        function(*arguments)
    except UserError as error:
        return str(error)

model = loading.load_policy("org/tiny")
base, row = loading.describe("org/tiny"), model.model.embed_tokens.weight[5].tolist()
adapted = add_adapter(model, AdapterConfig(r=2), "CAUSAL_LM", base)
Network(adapted).save_policy(Path(sys.argv[1]))
print(json.dumps({
    "weights": base.weights,
    "row": row,
    "tokens": loading.load_tokenizer("org/tiny")("12+30").input_ids,
    "head": list(loading.load_reward_model("org/tiny").score.weight.shape),
    "merged": str(merge(sys.argv[1], say=lambda line: None)),
    "rows": [row.messages[-1]["content"] for row in load("org/rows", (Conversation,)).rows],
    "no model": refused(loading.load_policy, "org/other"),
    "no tokenizer": refused(loading.load_tokenizer, "org/other"),
    "no rows": refused(load, "org/others", (Conversation,)),
}))
"""


@pytest.fixture
def home(tiny_llama, tiny_tokenizer, tmp_path) -> Path:
    """A cache of the hub with a model and a data set, laid out as huggingface_hub and datasets do."""
    model = tmp_path / "home" / "hub" / "models--org--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    snapshot = model / "snapshots" / COMMIT
    tiny_llama().save_pretrained(snapshot, max_shard_size="60KB")
    tiny_tokenizer.save_pretrained(snapshot)
    assert len(list(snapshot.glob("*.safetensors"))) > 1
    _rows(tmp_path / "home" / "datasets" / "org___rows" / "default" / "0.0.0" / COMMIT)
    return tmp_path / "home"


def _rows(folder: Path) -> None:
    import datasets
    from datasets.arrow_writer import ArrowWriter

    folder.mkdir(parents=True)
    features = datasets.Features({"prompt": datasets.Value("string"), "completion": datasets.Value("string")})
    with ArrowWriter(features=features, path=str(folder / "rows-train.arrow")) as writer:
        for row in ROWS:
            writer.write(row)
        writer.finalize()
    info = datasets.DatasetInfo(
        features=features,
        builder_name="parquet",
        dataset_name="rows",
        config_name="default",
        version="0.0.0",
        splits={"train": {"name": "train", "num_examples": len(ROWS), "dataset_name": "rows"}},  # type: ignore
    )
    info.write_to_directory(str(folder))


def test_only_cached_hub_ids_are_loaded_offline(home, tiny_llama, tiny_tokenizer, tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "COVERAGE"))
    }
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "adapter")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    snapshot = home / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert output["weights"] == weights_hash(str(snapshot))
    assert output["row"] == tiny_llama().model.embed_tokens.weight[5].tolist()
    assert output["tokens"] == tiny_tokenizer("12+30").input_ids
    assert output["head"] == [1, 32]
    assert weights_hash(output["merged"]) == output["weights"]  # a fresh adapter changes nothing
    assert output["rows"] == ["42", "10"]
    for what in ("no model", "no tokenizer", "no rows"):
        assert "org/other" in output[what] and "HF_HUB_OFFLINE" in output[what], output[what]
