"""The settings of every method. This module does not import torch, so that a recipe is checked quickly."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

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


class RolloutConfig(Config):
    """Settings of every method that learns from its own completions.

    A batch is ``per_device_train_batch_size`` prompts; each mini-batch is one optimizer step.
    """

    epochs: int = Field(1, ge=1, description="passes over a batch of rollouts")
    mini_batches: int = Field(1, ge=1, description="optimizer steps a pass; must divide the rollouts of a batch")
    target_kl: float | None = Field(None, gt=0, description="end the update when the policy moved 1.5 x this far")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0 needs none")
    kl_estimate: Estimate = Field("k1", description="estimate of a token's KL")
    kl_target: float | None = Field(None, gt=0, description="adapt kl_coef to this KL, nats a completion")
    kl_horizon: float = Field(10000, gt=0, description="rollouts over which the adaptive coefficient moves")
    importance_cap: float | None = Field(
        None, gt=0, description="weigh tokens by min(p / p of the sampler, this), where the two differ"
    )
    missing_eos: Literal["none", "subtract", "replace"] = Field("none", description="score of completions cut off")
    missing_eos_penalty: float | None = Field(None, description="what is subtracted, or put in its place")
    score_clip: float | None = Field(None, gt=0, description="scores are clipped to +- this")
    score_scale: float = Field(1.0, gt=0, description="scores are multiplied by this, before clipping")
    score_normalize: bool = Field(
        False, description="scores in units of the deviation of all scores so far, first of all"
    )
    evaluation: Literal["sampled", "greedy"] = Field("sampled", description="how held-out prompts are completed")
    max_sampler_mismatch: float = Field(
        0.05, gt=0, description="gap of log-probabilities between sampler and trainer, nats a token, that stops the run"
    )
    show_every: int = Field(5, ge=1, description="iterations between tables of samples")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kl_target and not self.kl_coef:
            raise ValueError("kl_target moves kl_coef by factors, so that 0 stays 0: set kl_coef above 0")
        if self.missing_eos != "none" and self.missing_eos_penalty is None:
            raise ValueError(f"missing_eos: {self.missing_eos} what? set missing_eos_penalty")
        return self


class ReinforceConfig(RolloutConfig):
    """Settings of REINFORCE; those of rollouts and updates belong to prompts only."""

    learn_eos: bool = Field(True, description="scored rows: learn the token that ends a turn, not its content alone")
    baseline: Baseline = Field(
        "none", description="what rewards are compared with: the step (mean), or the other completions of a prompt"
    )
    reduction: Reduction = Field("sequence_sum", description="how the losses of tokens become one number")
    clip_low: float | None = Field(None, ge=0, le=1, description="the ratio is clipped to [1 - this, 1 + clip_high]")
    clip_high: float | None = Field(None, ge=0)
    kl_in: Literal["reward", "loss"] = Field("reward", description="where the KL to the reference counts")
    reference: bool = Field(False, description="keep the starting policy to measure the KL, even where kl_coef is 0")
    floor: float | None = Field(None, lt=0, description="nothing is pushed down below this log-probability of a token")
    unlikelihood: bool = Field(False, description="-log(1 - p) in the place of log p where the reward is negative")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        clipped = self.clip_low is not None
        if clipped != (self.clip_high is not None):
            raise ValueError("clip_low and clip_high belong together: set both, as to 0.2, or none")
        if self.epochs > 1 and not clipped:
            raise ValueError(
                f"epochs {self.epochs}: the policy moves away from what it sampled: set clip_low, clip_high"
            )
        if self.floor is not None and self.unlikelihood:
            raise ValueError("floor and unlikelihood both bound what negative rewards do: choose one")
        if clipped and (self.floor is not None or self.unlikelihood):
            raise ValueError("floor and unlikelihood belong to the loss without clip_low and clip_high")
        if self.kl_in == "loss" and self.kl_coef and self.kl_estimate == "k1":
            raise ValueError("kl_estimate k1 has no gradient as a loss: set k2 (reverse KL) or k3 (forward KL)")
        if self.kl_in == "loss" and self.kl_target:
            raise ValueError("kl_target moves the coefficient in the reward: set kl_in: reward")
        return self


class PPOConfig(RolloutConfig):
    """Settings of PPO."""

    epochs: int = Field(4, ge=1, description="passes over a batch of rollouts")
    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1, description="bound on the loss of negative advantages")
    reduction: Reduction = Field("token_mean", description="how the losses of tokens become one number")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalized advantage estimation")
    whiten_advantages: bool = Field(True, description="to mean 0 and variance 1 over the batch")
    whiten_rewards: bool = Field(False, description="to variance 1 over the batch; the mean stays")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy, which is maximized")
    kl_coef: float = Field(0.05, ge=0, description="weight of the KL to the reference in the reward; 0 needs none")
    reference: bool = Field(True, description="keep the starting policy as the reference")
    critic: Literal["separate", "shared"] = Field("separate", description="own network, or a head on the policy")
    critic_start: Literal["auto", "policy"] = Field("auto", description="auto: a causal reward model, else the policy")
    critic_frozen: bool = Field(False, description="never update the critic")
    critic_learning_rate: float | None = Field(None, gt=0, description="default: the policy's")
    critic_warmup: int = Field(0, ge=0, description="iterations in which only the critic learns")
    value_coef: float = Field(0.5, ge=0, description="weight of the value loss")
    value_clip: float | None = Field(None, gt=0, description="free move of a value in an update, in units of score")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kl_coef and not self.reference:
            raise ValueError(f"kl_coef {self.kl_coef} needs a reference: set kl_coef to 0 or reference to true")
        if self.critic_warmup and (self.critic_frozen or not self.value_coef):
            raise ValueError(f"critic_warmup {self.critic_warmup}: nothing learns while critic_frozen or value_coef 0")
        return self
