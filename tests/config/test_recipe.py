import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from transformers import Trainer, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, _get_bitsandbytes_optimizer
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from burnish.config import StageData, StageModel, json_schema, load, shipped
from burnish.config.checks import RENAMED
from burnish.config.loading import RECIPES
from burnish.config.schema import RewardFromModel
from burnish.config.yaml import read
from burnish.errors import UserError
from burnish.methods.settings import PPOConfig
from burnish.models.settings import AdapterConfig
from burnish.render.truncate import Truncation
from burnish.training.arguments import ABSENT, OPTIM_ARGS, Tracker, TrainerConfig

PIPELINE = """\
# Two stages
name: two
stages:
  - name: make
    run: "make.py:rows"
    with: {rows: 3}
  - name: tune
    method: {name: sft, learn: last}
    model: gpt2
    data: {train: {stage: make, file: train.jsonl}, max_length: 16}
    trainer: {learning_rate: 1e-4, report_to: none, eval_strategy: no}
  - name: prefer
    method: {name: reward}
    model: {stage: tune}
    data: {train: pairs.jsonl}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make.py").write_text("def rows(folder, seed, rows):\n    pass\n\n\nscore = len\n")
    (tmp_path / "pairs.jsonl").write_text("")
    (tmp_path / "two.yaml").write_text(PIPELINE)
    return tmp_path


def message(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        load(*arguments)
    return str(caught.value)


def test_a_pipeline_is_read(folder):
    recipe = load("two.yaml")
    make, tune, prefer = recipe.stages
    assert tune.method and tune.data
    assert (recipe.name, recipe.seed, recipe.folder) == ("two", 0, Path("runs/two"))
    assert (make.run, make.arguments) == ("make.py:rows", {"rows": 3})
    assert tune.method.name == "sft" and tune.method.settings == {"learn": "last"}
    assert tune.data.train == StageData(stage="make", file="train.jsonl")
    assert (tune.data.max_length, tune.data.too_long) == (16, None)
    assert tune.trainer == TrainerConfig(learning_rate=0.0001)
    assert prefer.model == StageModel(stage="tune")


def test_files_of_functions_are_found_from_the_folder_of_the_recipe(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (folder / "elsewhere" / "pairs.jsonl").write_text("")
    recipe = load("../two.yaml")
    assert recipe.locate("make.py:rows") == f"{folder}/make.py:rows"
    assert recipe.locate("package.module:name") == "package.module:name"


def test_out_names_the_folder_of_the_run(folder):
    assert load("two.yaml", ["out=there/run"]).folder == Path("there/run")


def test_resolved_has_all_defaults_and_can_be_written_as_json(folder):
    plain = json.loads(json.dumps(load("two.yaml").resolved()))
    assert plain["stages"][1]["method"] == {"name": "sft", "learn": "last", "learn_eos": True}
    assert plain["stages"][0]["with"] == {"rows": 3}
    assert plain["stages"][1]["data"]["on_bad_row"] == "error"


def test_a_recipe_with_one_stage_may_omit_stages(folder):
    (folder / "one.yaml").write_text("method: {name: reward}\nmodel: gpt2\ndata: {train: pairs.jsonl}\nseed: 5\n")
    recipe = load("one.yaml", ["method.centering=0.5"])
    assert (recipe.name, recipe.seed, recipe.stages[0].name) == ("one", 5, "reward")
    method = recipe.stages[0].method
    assert method and method.settings == {"centering": 0.5}


def test_overrides_reach_stages_by_name_and_by_index(folder):
    recipe = load(
        "two.yaml",
        [
            "seed=3",
            "stages.tune.trainer.learning_rate=1e-5",
            "stages.1.method.learn=all",
            "stages.tune.generation.stop=['a']",
            "stages.prefer.model={stage: tune}",
        ],
    )
    tune = recipe.stages[1]
    assert recipe.seed == 3
    assert tune.trainer.learning_rate == 1e-5
    assert tune.trainer.report_to == "none"
    assert tune.method and tune.method.settings == {"learn": "all"}
    assert tune.generation.stop == ["a"]


def test_an_override_with_null_removes_a_block(folder):
    adapter = load("two.yaml", ["stages.tune.adapter.r=4"]).stages[1].adapter
    assert adapter and adapter.r == 4
    assert load("two.yaml", ["stages.tune.adapter.r=4", "stages.tune.adapter=null"]).stages[1].adapter is None


@pytest.mark.parametrize(("text", "value"), [
    ("1e-4", 1e-4), ("1E5", 1e5), ("1.", 1.0), ("-.5", -0.5), (".inf", float("inf")), ("12", 12), ("1_000", 1000),
    ("no", "no"), ("on", "on"), ("2026-01-01", "2026-01-01"), ("1:30", "1:30"), ("true", True), ("~", None),
    ("'1e-4'", "1e-4"), ("e5", "e5"), ("-", [None]), ("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}),
])  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert read(text, "x").value == value
    assert type(read(text, "x").value) is type(value)


def test_values_that_are_not_plain_yaml_are_reported_with_their_line():
    for text, expected in {
        "a: 1\nb:\n  c: 1\n  c: 2": "r.yaml:4: c: this key is written twice, first in line 3",
        "a: 1\n2: b": "r.yaml:2: a key must be text, got 2",
        "a: !own x": "r.yaml:1: expected text, a number",
        "a: [1\nb: 2": "r.yaml:2: not valid YAML",
        "a: *b": "r.yaml:1: not valid YAML: found undefined alias 'b'",
    }.items():
        with pytest.raises(UserError, match=re.escape(expected)):
            read(text, "r.yaml")


def test_keys_of_a_merged_block_have_the_line_of_the_block():
    document = read("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\n", "r.yaml")
    assert document.value["c"] == {"b": 1, "d": 2}
    assert document.where(("c", "b")) == "r.yaml:2"


def test_every_key_has_its_line():
    document = read("a:\n  b: 1\n  c:\n    - x\n    - d: 2\n", "r.yaml")
    assert document.where(("a", "b")) == "r.yaml:2"
    assert document.where(("a", "c", 1, "d")) == "r.yaml:5"
    assert document.where(("a", "c", 1, "missing", "deep")) == "r.yaml:5"
    assert document.where(("other",)) == "r.yaml"


def test_anchors_are_followed_and_endless_ones_refused():
    assert read("a: &x {b: 1}\nc: *x\n", "r.yaml").value == {"a": {"b": 1}, "c": {"b": 1}}
    with pytest.raises(UserError, match=r"r\.yaml:1: more than 32 blocks"):
        read("&x [*x]", "r.yaml")


def test_several_mistakes_are_one_message_in_the_order_of_the_file(folder):
    (folder / "two.yaml").write_text(PIPELINE.replace("max_length", "max_lenght").replace("name: two", "nmae: two"))
    lines = message("two.yaml", ["seed=-1"]).splitlines()
    assert lines[0] == "two.yaml: 3 mistakes"
    assert lines[1].startswith("  two.yaml:2: nmae: unknown key (did you mean 'name'?)")
    assert lines[2].startswith("  two.yaml:10: stages.tune.data.max_lenght: unknown key (did you mean 'max_length'?)")
    assert lines[3] == "  command line: seed: expected 0 or more, got -1"


def test_a_key_one_level_too_high_is_reported_with_its_block(folder):
    assert "it belongs to trainer: trainer.learning_rate" in message("two.yaml", ["stages.tune.learning_rate=1"])
    assert "it belongs to method: method.centering" in message("two.yaml", ["stages.prefer.centering=1"])
    assert "it belongs to a stage: stages.NAME.adapter" in message("two.yaml", ["adapter.r=1"])


ANYTHING = ["null", "true", "-1", "0.5", "''", "x", "./x", "[]", "[null]", "[{}]", "{}", "{stage: x}", "{name: sft}"]
PLACES = [
    "name", "out", "seed", "threads", "stages", "stages.0", "stages.0.name", "stages.0.run", "stages.0.with",
    "stages.tune", "stages.1.name", "stages.tune.method", "stages.tune.method.name", "stages.tune.method.learn",
    "stages.tune.model", "stages.tune.template", "stages.tune.precision", "stages.tune.adapter",
    "stages.tune.adapter.r", "stages.tune.data", "stages.tune.data.train", "stages.tune.data.train.stage",
    "stages.tune.data.eval", "stages.tune.data.keys", "stages.tune.data.limit", "stages.tune.reward",
    "stages.tune.generation", "stages.tune.generation.stop", "stages.tune.trainer", "stages.tune.trainer.report_to",
    "stages.tune.trainer.eval_strategy", "stages.tune.trainer.optim", "stages.tune.trainer.fsdp_config",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_any_value_anywhere_is_accepted_or_reported(folder, place):
    for value in ANYTHING:
        try:
            recipe = load("two.yaml", [f"{place}={value}"])
        except UserError as error:
            assert place.rpartition(".")[2] in str(error) or "stage" in str(error)
        else:
            assert json.dumps(recipe.resolved())


def test_trackers_are_known_and_installed(folder, monkeypatch):
    monkeypatch.setattr(
        "transformers.integrations.integration_utils.get_available_reporting_integrations", lambda: ["wandb"]
    )
    at = "stages.tune.trainer.report_to"
    assert load("two.yaml", [f"{at}=[wandb]"]).stages[1].trainer.report_to == ["wandb"]
    assert "did you mean 'tensorboard'?" in message("two.yaml", [f"{at}=tensorbord"])
    assert "mlflow is not installed" in message("two.yaml", [f"{at}=mlflow"])


def test_methods_and_rewards_may_come_from_any_module(folder, monkeypatch):
    (folder / "mine.py").write_text(
        "from burnish.protocols import MethodSpec\nfrom burnish.types import Config, Text\n\n\n"
        "class MineConfig(Config):\n    push: float = 1.0\n\n\n"
        'class Mine:\n    spec = MethodSpec("mine", MineConfig, (Text,))\n\n\nclass Bare:\n    pass\n'
    )
    monkeypatch.syspath_prepend(folder)
    recipe = load("two.yaml", ["stages.tune.method={name: 'mine:Mine', push: 2}"])
    assert recipe.resolved()["stages"][1]["method"] == {"name": "mine:Mine", "push": 2.0}
    assert "command line: stages.tune.method.pusch: unknown key (did you mean 'push'?)" in message(
        "two.yaml", ["stages.tune.method={name: 'mine:Mine'}", "stages.tune.method.pusch=2"]
    )
    assert "mine has no 'Mein' (did you mean 'Mine'?)" in message(
        "two.yaml", ["stages.tune.method={name: 'mine:Mein'}"]
    )
    assert "its class must be a MethodSpec, got None" in message("two.yaml", ["stages.tune.method={name: 'mine:Bare'}"])
    assert "there is no module 'mein'" in message("two.yaml", ["stages.tune.method={name: 'mein:Mine'}"])


def test_the_schema_knows_methods_and_training_arguments():
    made = json_schema()
    names = [block["properties"]["name"].get("const") for block in made["$defs"]["MethodChoice"]["oneOf"]]
    assert names[-1] is None and {"pretrain", "sft", "ppo", "sample", "filter"} <= set(names)
    trainer = made["$defs"]["TrainerConfig"]["properties"]
    assert "learning_rate" in trainer and "output_dir" not in trainer
    assert [set(way["required"]) for way in made["anyOf"]] == [{"stages"}, set()]
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize("name", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_is_valid(name):
    assert shipped()[name]
    assert load(name).stages


def test_shipped_recipes_are_described_by_their_first_line(tmp_path, monkeypatch):
    (tmp_path / "quick.yaml").write_text("# All of it in a minute.\nname: quick\n")
    monkeypatch.setattr("burnish.config.loading.RECIPES", tmp_path)
    assert shipped() == {"quick": "All of it in a minute."}


def test_a_field_of_the_trainer_that_does_nothing_is_refused(folder):
    said = message("two.yaml", ["stages.tune.trainer.label_smoothing_factor=0.1"])
    assert "trainer.label_smoothing_factor: this key is not allowed in recipes: methods with label" in said


def test_every_field_of_training_arguments_is_a_setting_or_has_a_reason():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)} | {"on_non_finite"}
    renamed = {"gradient_checkpointing", "gradient_checkpointing_kwargs"}
    assert set(TrainerConfig.model_fields) | set(ABSENT) | renamed == fields
    assert not set(TrainerConfig.model_fields) & set(ABSENT)


def test_defaults_of_the_trainer_are_those_of_transformers_but_for_four():
    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    ours = {name: field.default for name, field in TrainerConfig.model_fields.items() if name != "on_non_finite"}
    different = {name for name, value in ours.items() if value != theirs[name] and (value or theirs[name])}
    assert different == {"num_train_epochs", "logging_steps", "save_steps", "save_total_limit"}


@pytest.mark.parametrize(
    ("setting", "kind"),
    [("optim", OptimizerNames), ("lr_scheduler_type", SchedulerType), ("save_strategy", SaveStrategy),
     ("eval_strategy", IntervalStrategy), ("logging_strategy", IntervalStrategy), ("hub_strategy", HubStrategy)],
)  # fmt: skip
def test_choices_of_the_trainer_are_those_of_transformers(setting, kind):
    assert set(get_args(TrainerConfig.model_fields[setting].annotation)) == {str(one.value) for one in kind}


def test_trackers_are_those_of_transformers():
    assert set(get_args(Tracker)) == {*INTEGRATION_TO_CALLBACK, "all", "none"}


def test_settings_of_the_trainer_reach_training_arguments(tmp_path):
    config = TrainerConfig.model_validate({"warmup_steps": 3, "optim": "sgd", "report_to": ["none"]})
    arguments = TrainingArguments(str(tmp_path), **config.arguments())
    assert (arguments.warmup_steps, arguments.optim, arguments.save_steps) == (3, "sgd", 0.25)


@pytest.mark.parametrize("old", RENAMED)
def test_a_key_that_was_renamed_is_an_error_with_the_new_name(folder, old):
    place = {
        "gradient_checkpointing": "trainer", "gradient_checkpointing_kwargs": "trainer", "on_long": "data",
        "quantise": "adapter", "normalise": "reward.0",
    }.get(old, "method")  # fmt: skip
    scored = ["stages.prefer.method={name: ppo}", "stages.prefer.reward=[{model: {stage: tune}}]"]
    said = message("two.yaml", [*scored, f"stages.prefer.{place}.{old}=1"])
    assert said == f"command line: stages.prefer.{place}.{old}: this key was renamed: write {RENAMED[old]}"


def test_a_new_name_is_a_key():
    known = {*TrainerConfig.model_fields, *Truncation.model_fields, *AdapterConfig.model_fields}
    known |= {*RewardFromModel.model_fields, *PPOConfig.model_fields}
    assert {new.partition(":")[0] for new in RENAMED.values()} <= known


def test_names_that_are_kept_are_in_the_schema():
    keep = json_schema()["$defs"]["Data"]["properties"]["keep"]
    assert keep["type"] == "array" and keep["items"] == {"type": "string"} and keep["default"] == []


# A field, and the other field that it depends on.
READ_WITH = [
    ("eval_steps=2", "eval_strategy=steps"),
    ("eval_delay=2", "eval_strategy=epoch"),
    ("logging_steps=2", "logging_strategy=steps", "logging_strategy=epoch"),
    ("save_steps=2", "save_strategy=steps", "save_strategy=no"),
    ("save_total_limit=2", "save_strategy=epoch", "save_strategy=no"),
    ("save_only_model=true", "save_strategy=epoch", "save_strategy=no"),
    ("metric_for_best_model=loss", "load_best_model_at_end=true"),
    ("greater_is_better=true", "lr_scheduler_type=reduce_lr_on_plateau"),
    ("lr_scheduler_kwargs={min_lr: 1e-6}", "lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_type=constant"),
    ("warmup_steps=2", "lr_scheduler_type=constant_with_warmup", "lr_scheduler_type=constant"),
    ("adam_beta2=0.9", "optim=adamw_torch", "optim=sgd"),
    ("adam_epsilon=0.1", "optim=adamw_torch", "optim=lion_32bit"),
    ("weight_decay=0.1", "optim=sgd", "optim=galore_adamw"),
    ("optim_target_modules=all-linear", "optim=galore_adamw"),
    ("torch_compile_mode=default", "torch_compile=true"),
    ("activation_checkpointing_kwargs={use_reentrant: false}", "activation_checkpointing=true"),
    ("hub_model_id=me/mine", "push_to_hub=true"),
    ("optim_args=momentum=0.9", "optim=sgd"),
]


@pytest.mark.parametrize("fields", READ_WITH, ids=lambda fields: fields[0].partition("=")[0])
def test_a_field_of_the_trainer_that_belongs_to_another_one(folder, fields, monkeypatch):
    monkeypatch.setattr("burnish.training.arguments.PACKAGES", {})  # as if the packages of all optimizers were there
    (folder / "held.jsonl").write_text("")
    field, with_it, *without = [f"stages.prefer.trainer.{text}" for text in fields]
    key = field.partition("=")[0]
    said = message("two.yaml", [field, *without])
    assert said.startswith(f"command line: {key}: ") and fields[1].partition("=")[0] in said
    load("two.yaml", [field, with_it, "stages.prefer.data.eval=held.jsonl"])


def test_a_field_with_its_default_value_is_always_allowed(folder):
    kept = ["lr_scheduler_type=constant", "warmup_steps=0", "eval_delay=0", "optim_args=null", "adam_beta1=0.9"]
    load("two.yaml", [f"stages.prefer.trainer.{text}" for text in (*kept, "optim=sgd")])


@pytest.mark.parametrize(
    ("optimizer", "given", "said"),
    [
        ("sgd", "momentun=0.9", "sgd does not read 'momentun' (did you mean 'momentum'?)"),
        ("sgd", "momentum=0.9, weight_decay=0.1", "trainer.weight_decay overrides weight_decay"),
        ("rmsprop", "alpha", "expected name=value, name=value, got 'alpha'"),
        ("adamw_torch_fused", "betas=0.9", "adamw_torch_fused reads no optim_args; these do: sgd, "),
        ("adafactor", "scale_parameter=true", "adafactor reads no optim_args"),
    ],
)
def test_optim_args_that_no_optimizer_reads(folder, optimizer, given, said):
    fields = [f"stages.prefer.trainer.optim={optimizer}", f"stages.prefer.trainer.optim_args={given}"]
    assert f"stages.prefer.trainer.optim_args: {said}" in message("two.yaml", fields)


def test_what_optimizers_read_is_what_transformers_reads():
    """By the code of each optimizer's maker: it looks its names up in ``optim_args``, and in nothing else."""
    for key, maker in _OPTIMIZER_HANDLERS.items():
        optimizer, code = OptimizerNames(key).value, inspect.getsource(maker)
        if maker is _get_bitsandbytes_optimizer and "ademamix" not in optimizer:
            assert (optimizer in OPTIM_ARGS) == ("rmsprop" in optimizer)
            continue
        matches = set(re.findall(r'optim_args\.(?:get|pop)\(\s*"(\w+)"|"(\w+)" in ctx\.optim_args', code))
        names = {name for pair in matches for name in pair if name}
        names |= set(re.findall(r'"(\w+)"', "".join(re.findall(r"for key in \((.*)\)", code))))
        assert names - {"weight_decay"} == set(OPTIM_ARGS.get(optimizer) or ()), optimizer


def test_which_optimizers_read_betas_is_what_transformers_reads():
    reads = {"weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}
    for name in ("adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop"):
        plain, other = (
            Trainer.get_optimizer_cls_and_kwargs(
                TrainingArguments("x", optim=name, adam_beta1=beta, adam_beta2=beta, adam_epsilon=beta)
            )[1]
            for beta in (0.1, 0.2)
        )
        config = TrainerConfig.model_validate({"optim": name} | dict.fromkeys(reads, 0.5))
        unread = {key for key, _ in config.conflicts()}
        assert (plain != other) == (unread == set())
        assert plain != other or unread == reads - {"weight_decay"}


@pytest.mark.parametrize("generator", ["local", "continuous", "process"])
def test_sampling_ahead_needs_a_generator_in_another_process(
    generator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (tmp_path / "recipe.yaml").write_text(
        "name: ahead\nmethod: {name: grpo, max_staleness: 1}\nmodel: base\ndata: {train: prompts.jsonl}\n"
        f"reward: [{{model: judge}}]\ngeneration: {{samples: 2}}\ngenerator: {{name: {generator}}}\n"
    )
    if generator == "process":
        assert load(tmp_path / "recipe.yaml").stages[0].generator.name == "process"
        return
    with pytest.raises(UserError, match=rf"max_staleness: 1 needs .* and {generator} works .* to {{name: process}}"):
        load(tmp_path / "recipe.yaml")
