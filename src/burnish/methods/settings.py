"""The settings of every method. This module does not import torch, so that a recipe is checked quickly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from burnish.math.choices import (
    WITH_SMOOTHING,
    WITHOUT_REFERENCE,
    Baseline,
    Estimate,
    PreferenceLoss,
    Reduction,
)
from burnish.types import Config


class PretrainConfig(Config):
    """Settings of continued pre-training."""

    packing: Literal["documents", "chop"] = Field(
        "documents",
        description="documents: each is learned by itself, and one longer than data.max_length in pieces that lose no "
        "target; chop: all are joined, each ended by EOS, and cut to a fixed length, so that attention crosses them",
    )
    chop_length: int = Field(2048, ge=2, description="tokens of a piece that packing: chop makes")
    eval_chop_length: int = Field(1024, ge=2, description="the same for rows that training does not see")


class SFTConfig(Config):
    """Settings of supervised fine-tuning."""

    learn: Literal["last", "all", "completion", "everything"] | None = Field(
        None, description="assistant turns that are learned; default: all, or the completion where rows have one"
    )
    learn_eos: bool = Field(True, description="learn the token that ends a turn, so that the model learns to stop")


class RewardConfig(Config):
    """Settings of reward modelling."""

    centering: float = Field(0.0, ge=0, description="weight of (r_chosen + r_rejected)^2, which keeps scores near 0")


class DPOConfig(Config):
    """Settings of the DPO family; a setting that the loss does not read is an error."""

    loss: PreferenceLoss | Literal["kto"] = Field(
        "sigmoid", description="sigmoid is DPO; kto learns from single answers"
    )
    beta: float = Field(0.1, gt=0, description="how strongly the policy is held to the reference (simpo: about 2)")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of labels that are taken to be wrong")
    average: bool = Field(False, description="average log-probabilities over tokens (simpo and orpo always do)")
    gamma: float = Field(0.5, ge=0, description="simpo: the margin that is asked of every pair")
    orpo_weight: float = Field(0.1, ge=0, description="orpo: lambda, the weight of the odds ratio beside the nll")
    nll_weight: float = Field(0.0, ge=0, description="weight of the chosen answers' nll a token (RPO)")
    desirable_weight: float = Field(1.0, ge=0, description="kto: weight of good answers")
    undesirable_weight: float = Field(1.0, ge=0, description="kto: weight of bad answers")
    reference: Literal["precomputed", "live"] = Field(
        "precomputed", description="precomputed: once, kept on disk; live: a forward pass at every step"
    )

    @model_validator(mode="after")
    def _read(self) -> Self:
        """Refuse what would be ignored."""
        unread = {
            "beta": self.loss == "orpo",
            "label_smoothing": self.loss not in WITH_SMOOTHING,
            "average": self.loss in WITHOUT_REFERENCE,
            "gamma": self.loss != "simpo",
            "orpo_weight": self.loss != "orpo",
            "nll_weight": self.loss in ("orpo", "kto"),
            "desirable_weight": self.loss != "kto",
            "undesirable_weight": self.loss != "kto",
            "reference": self.loss in WITHOUT_REFERENCE,
        }
        for name in self.model_fields_set:
            if unread.get(name):
                raise ValueError(f"{name} is not read by loss {self.loss}: take it away")
        return self

    @property
    def averaged(self) -> bool:
        """Whether log-probabilities are averaged over tokens."""
        return self.average or self.loss in WITHOUT_REFERENCE


class StepValueConfig(Config):
    """Settings of step-level value models."""

    alpha: float = Field(0.1, ge=0, description="weight of the squared error of the values")
    learn: Literal["steps", "everything"] = Field(
        "steps", description="tokens of correct solutions that are learned; everything: those of the question too"
    )
    learn_eos: bool = Field(True, description="learn the token that ends a correct solution")
    delimiter: str = Field("\n", min_length=1, description="what ends a step, in training and in search")


# --- policy gradient ----------------------------------------------------------------------------------------------
# Three blocks choose the loss, the advantage estimator and the critic. A block without a name keeps the preset's.

OWN = "<file.py:name>"


class ReinforceLoss(Config):
    """-A log p, without a ratio: for one optimizer step on each batch of rollouts."""

    name: Literal["reinforce"]
    floor: float | None = Field(None, lt=0, description="nothing is pushed down below this log-probability of a token")
    unlikelihood: bool = Field(False, description="-log(1 - p) in the place of log p where the advantage is negative")

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.floor is not None and self.unlikelihood:
            raise ValueError("floor and unlikelihood both bound what negative advantages do: choose one")
        return self


DualClip = Annotated[
    float | None, Field(gt=1, description="bound on the loss of tokens with a negative advantage, in units of it")
]


class ClipLoss(Config):
    """The clipped ratio of PPO."""

    name: Literal["clip"]
    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(0.2, ge=0)
    dual_clip: DualClip = None


class GSPOLoss(Config):
    """The clipped ratio of whole sequences; gspo_token takes an advantage for each token."""

    name: Literal["gspo", "gspo_token"]
    clip_low: float = Field(3e-4, ge=0, le=1, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(4e-4, ge=0)
    dual_clip: DualClip = None


class CISPOLoss(Config):
    """The log-probability, weighted by a ratio that is bounded from above."""

    name: Literal["cispo"]
    clip_high: float | None = Field(4.0, ge=0, description="the weight is at most 1 + clip_high; null: no bound")
    dual_clip: DualClip = None


class SAPOLoss(Config):
    """A smooth gate in place of the clip."""

    name: Literal["sapo"]
    tau_positive: float = Field(1.0, gt=0, description="how fast the gate closes where the advantage is positive")
    tau_negative: float = Field(1.05, gt=0, description="the same where it is negative")
    dual_clip: DualClip = None


class OwnFunction(Config, extra="allow"):
    """A function of the user's own, ``my_loss.py:name`` or ``package.module:name``; other keys are its arguments."""

    name: str


class GAE(Config):
    """Generalized advantage estimation: reads the values of a critic."""

    name: Literal["gae"]
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalized advantage estimation")
    whiten: bool = Field(True, description="advantages to mean 0 and variance 1 over the batch")


class Compared(Config):
    """Rewards of completions, compared with one another and without a critic (``math.advantages``)."""

    name: Baseline


class NoCritic(Config):
    """Nothing predicts the returns."""

    name: Literal["none"]


class Critic(Config):
    """What predicts the returns: a network of its own (separate), or a head on the policy (shared)."""

    name: Literal["separate", "shared"]
    start: Literal["auto", "policy"] = Field(
        "auto", description="separate: start from a causal reward model if there is one, else from the policy"
    )
    frozen: bool = Field(False, description="never update the critic")
    learning_rate: float | None = Field(None, gt=0, description="default: the policy's")
    warmup: int = Field(0, ge=0, description="iterations in which only the critic learns")
    coef: float = Field(0.5, ge=0, description="weight of the value loss")
    clip: float | None = Field(None, gt=0, description="free move of a value in an update, in units of score")

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.warmup and (self.frozen or not self.coef):
            raise ValueError(f"critic.warmup {self.warmup}: nothing learns while critic.frozen or critic.coef 0")
        if self.name == "shared" and "start" in self.model_fields_set and self.start != "auto":
            raise ValueError("critic.start belongs to critic: separate; a shared critic is a new head")
        return self


def _tag(value: Any) -> str | None:
    """The branch of a block: the class that has its name, or the user's own function."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return OWN if isinstance(name, str) and ":" in name else f"<{name}>"


def _choice(*classes: type[Config], own: bool = True) -> Any:
    """A block that is one of these classes, chosen by its name."""
    names = {name: cls for cls in classes for name in get_args(cls.model_fields["name"].annotation)}
    branches = [Annotated[cls, Tag(f"<{name}>")] for name, cls in names.items()]
    if own:
        branches.append(Annotated[OwnFunction, Tag(OWN)])
    expected = ", ".join(names) + (" or file.py:name" if own else "")
    return Annotated[
        Union[tuple(branches)],  # noqa: UP007
        Discriminator(_tag, custom_error_type="expected", custom_error_message=f"a block with name: {expected}"),
    ]


if TYPE_CHECKING:
    PolicyLoss = ReinforceLoss | ClipLoss | GSPOLoss | CISPOLoss | SAPOLoss | OwnFunction
    Advantage = GAE | Compared | OwnFunction
    CriticChoice = NoCritic | Critic
else:
    PolicyLoss = _choice(ReinforceLoss, ClipLoss, GSPOLoss, CISPOLoss, SAPOLoss)
    Advantage = _choice(GAE, Compared)
    CriticChoice = _choice(NoCritic, Critic, own=False)


class Correction(Config):
    """Weights of the loss where sampler and trainer differ in their log-probabilities: ``{mode: truncate, cap: 2}``."""

    mode: Literal["truncate", "mask"]
    level: Literal["token", "sequence"] = Field("token", description="the ratio of a token, or of a whole completion")
    cap: float = Field(2.0, gt=0, description="truncate: the largest weight")
    low: float = Field(0.5, ge=0, description="mask: a smaller ratio gets weight 0")
    high: float = Field(2.0, gt=0, description="mask: a larger ratio gets weight 0")

    @model_validator(mode="after")
    def _read(self) -> Self:
        unread = {"cap"} if self.mode == "mask" else {"low", "high"}
        for name in sorted(unread & self.model_fields_set):
            raise ValueError(f"{name} is not read by mode {self.mode}: take it away")
        if self.mode == "mask" and self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class Overlong(Config):
    """Soft penalty of completions that come near max_new_tokens (DAPO): ``{buffer: 64, penalty: 1}``."""

    buffer: int = Field(ge=1, description="in how many tokens before max_new_tokens the penalty grows from 0")
    penalty: float = Field(1.0, gt=0, description="what a completion of max_new_tokens loses, in units of score")


Reduced = Annotated[Reduction, Field(description="how the losses of tokens become one number")]
Epochs = Annotated[int, Field(ge=1, description="passes over a batch of rollouts")]
KLCoef = Annotated[float, Field(ge=0, description="weight of the KL to the reference; 0 needs none")]
KLIn = Annotated[Literal["reward", "loss"], Field(description="where the KL to the reference counts")]
KLEstimate = Annotated[Estimate, Field(description="estimate of a token's KL")]
KeepReference = Annotated[
    bool, Field(description="keep the starting policy to measure the KL, even where kl_coef is 0")
]


def _abbreviated(schema: dict[str, Any]) -> None:
    """A block may also be a name alone, or settings without a name."""
    schema["anyOf"] = [{"type": "string"}, {"type": "object", "not": {"required": ["name"]}}, *schema.pop("oneOf")]


LossBlock = Annotated[
    PolicyLoss,
    Field(description="policy loss of a token: its name and its settings", json_schema_extra=_abbreviated),
]
AdvantageBlock = Annotated[
    Advantage,
    Field(description="advantage estimator: its name and its settings", json_schema_extra=_abbreviated),
]
CriticBlock = Annotated[
    CriticChoice,
    Field(description="what predicts returns: its name and its settings", json_schema_extra=_abbreviated),
]


class PolicyGradientConfig(Config):
    """Settings of every method that learns from its own completions; the presets below have other defaults.

    A batch is ``per_device_train_batch_size`` prompts; each mini-batch is one optimizer step.
    """

    policy_loss: LossBlock = ReinforceLoss.model_validate({"name": "reinforce"})
    advantage: AdvantageBlock = Compared.model_validate({"name": "none"})
    critic: CriticBlock = NoCritic.model_validate({"name": "none"})
    reduction: Reduced = "sequence_sum"
    epochs: Epochs = 1
    mini_batches: int = Field(1, ge=1, description="optimizer steps a pass; must divide the rollouts of a batch")
    target_kl: float | None = Field(None, gt=0, description="end the update when the policy moved 1.5 x this far")
    kl_coef: KLCoef = 0.0
    kl_in: KLIn = "reward"
    kl_estimate: KLEstimate = "k1"
    kl_target: float | None = Field(None, gt=0, description="adapt kl_coef to this KL, nats a completion")
    kl_horizon: float = Field(10000, gt=0, description="rollouts over which the adaptive coefficient moves")
    reference: KeepReference = False
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy, which is maximized")
    correction: Correction | None = Field(
        None, description="weigh the loss of tokens that were sampled with other probabilities than the trainer's"
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        description="how often prompts whose completions all have the same score are replaced by others in a batch",
    )
    missing_eos: Literal["none", "subtract", "replace"] = Field("none", description="score of completions cut off")
    missing_eos_penalty: float | None = Field(None, description="what is subtracted, or put in its place")
    overlong: Overlong | None = Field(None, description="soft penalty of long completions")
    score_clip: float | None = Field(None, gt=0, description="scores are clipped to +- this")
    score_scale: float = Field(1.0, gt=0, description="scores are multiplied by this, before clipping")
    score_normalize: bool = Field(
        False, description="scores in units of the deviation of all scores so far, first of all"
    )
    whiten_rewards: bool = Field(False, description="rewards of tokens to variance 1 over the batch; the mean stays")
    evaluation: Literal["sampled", "greedy"] = Field("sampled", description="how held-out prompts are completed")
    max_sampler_mismatch: float = Field(
        0.05, gt=0, description="gap of log-probabilities between sampler and trainer, nats a token, that stops the run"
    )
    show_every: int = Field(5, ge=1, description="iterations between tables of samples")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """``critic: shared`` is ``critic: {name: shared}``; a block without a name keeps that of the preset."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        for key in BLOCKS & set(given):
            value, preset = given[key], cls.model_fields[key].default
            if isinstance(value, str):
                given[key] = {"name": value}
            elif isinstance(value, dict) and "name" not in value:
                given[key] = {"name": preset.name, **value}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if reason := next(self._contradictions(), None):
            raise ValueError(reason)
        return self

    def _contradictions(self) -> Iterator[str]:
        """Why these settings do not go together."""
        loss, estimator, critic = self.policy_loss, self.advantage, self.critic
        if isinstance(estimator, GAE) and isinstance(critic, NoCritic):
            yield (
                "advantage gae reads the values of a critic, and critic is none: set critic to shared or separate, or "
                "another advantage, such as rloo"
            )
        if isinstance(estimator, Compared) and isinstance(critic, Critic):
            yield (
                f"critic {critic.name}: advantage {estimator.name} does not read its values, so what it learns would "
                "not be used: set critic: none, or advantage: gae"
            )
        if isinstance(loss, ReinforceLoss) and self.epochs > 1:
            yield (
                f"epochs {self.epochs}: the policy moves away from what it sampled, and policy_loss reinforce takes no "
                "account of it: set policy_loss to clip, or another one with a ratio"
            )
        if self.kl_coef and not self.reference and "reference" in self.model_fields_set:
            yield f"kl_coef {self.kl_coef} needs a reference: set kl_coef to 0 or reference to true"
        if self.kl_target and not self.kl_coef:
            yield "kl_target moves kl_coef by factors, so that 0 stays 0: set kl_coef above 0"
        if self.kl_in == "loss" and self.kl_coef and self.kl_estimate == "k1":
            yield "kl_estimate k1 has no gradient as a loss: set k2 (reverse KL) or k3 (forward KL)"
        if self.kl_in == "loss" and self.kl_target:
            yield "kl_target moves the coefficient in the reward: set kl_in: reward"
        if self.missing_eos != "none" and self.missing_eos_penalty is None:
            yield f"missing_eos: {self.missing_eos} what? set missing_eos_penalty"


BLOCKS = {"policy_loss", "advantage", "critic"}


# The presets: what each name sets. Everything else is as in PolicyGradientConfig.


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    policy_loss: LossBlock = ClipLoss.model_validate({"name": "clip"})
    advantage: AdvantageBlock = GAE.model_validate({"name": "gae"})
    critic: CriticBlock = Critic.model_validate({"name": "separate"})
    reduction: Reduced = "token_mean"
    epochs: Epochs = 4
    kl_coef: KLCoef = 0.05
    reference: KeepReference = True


class ReinforceConfig(PolicyGradientConfig):
    """Settings of REINFORCE; those of rollouts and updates belong to prompts only."""

    learn_eos: bool = Field(True, description="scored rows: learn the token that ends a turn, not its content alone")


class RLOOConfig(PolicyGradientConfig):
    """Settings of RLOO."""

    advantage: AdvantageBlock = Compared.model_validate({"name": "rloo"})
    kl_coef: KLCoef = 0.05


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    policy_loss: LossBlock = ClipLoss.model_validate({"name": "clip"})
    advantage: AdvantageBlock = Compared.model_validate({"name": "group_std"})
    reduction: Reduced = "sequence_mean"
    kl_coef: KLCoef = 0.04
    kl_in: KLIn = "loss"
    kl_estimate: KLEstimate = "k3"


PRESETS: dict[str, type[PolicyGradientConfig]] = {
    "ppo": PPOConfig,
    "reinforce": ReinforceConfig,
    "rloo": RLOOConfig,
    "grpo": GRPOConfig,
}


def preset_table() -> dict[str, dict[str, Any]]:
    """Each preset's defaults of the settings that differ between presets: {"rloo": {"advantage": "rloo", ...}, ...}."""
    fields = PolicyGradientConfig.model_fields
    defaults = {
        name: {key: getattr(default := config.model_fields[key].default, "name", default) for key in fields}
        for name, config in PRESETS.items()
    }
    different = [key for key in fields if len({str(values[key]) for values in defaults.values()}) > 1]
    return {name: {key: values[key] for key in different} for name, values in defaults.items()}
