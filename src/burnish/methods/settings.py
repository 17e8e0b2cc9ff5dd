"""The settings of every method. This module does not import torch, so that checking a recipe is fast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from burnish.errors import UserError
from burnish.generate.sampling import check_temperature
from burnish.judges.constitution import Principle, check_principles, load_constitution
from burnish.judges.settings import JudgeSettings, Principles, principle_texts
from burnish.math.choices import (
    WITH_SMOOTHING,
    WITHOUT_REFERENCE,
    Baseline,
    Divergence,
    Estimate,
    PreferenceLoss,
)
from burnish.models.settings import ModelSource
from burnish.search.settings import AnswerSettings, StepSettings
from burnish.types import Config


class PretrainConfig(Config):
    """Settings of continued pre-training."""

    packing: Literal["documents", "chop"] = Field(
        "documents",
        description="documents: each document is its own sequence; one longer than data.max_length is split without "
        "losing a target; chop: all documents are joined, separated by EOS, and cut into pieces of a fixed length, so "
        "attention crosses document boundaries",
    )
    chop_length: int = Field(2048, ge=2, description="tokens in each piece (packing: chop)")
    eval_chop_length: int = Field(1024, ge=2, description="tokens in each piece of the held-out rows (packing: chop)")


class SFTConfig(Config):
    """Settings of supervised fine-tuning."""

    learn: Literal["last", "all", "completion", "everything"] | None = Field(
        None,
        description="which tokens enter the loss; default: the completion for rows that have one, otherwise all "
        "assistant turns",
    )
    learn_eos: bool = Field(True, description="train on the token that ends a turn, so that the model learns to stop")


class SampleConfig(Config):
    """Settings of ``sample``, which completes prompts. ``generation:`` has the number of samples and the others."""


class SearchConfig(Config):
    """Settings of ``search``, which solves questions by tree search and writes their solutions as rows."""

    simulations: int = Field(40, ge=1, description="maximum number of simulations of a tree")
    children: int = Field(5, ge=1, description="steps that are sampled after each state")
    exploration: float = Field(1.25, ge=0, description="weight of rarely visited steps against those with a high Q")
    trees: int = Field(1, ge=1, description="maximum number of trees of a question")
    correct: int = Field(4, ge=1, description="maximum number of correct solutions that are kept of a question")
    incorrect: int = Field(4, ge=0, description="maximum number of incorrect solutions that are kept of a question")
    tokens: int | None = Field(None, ge=1, description="maximum number of tokens that are sampled for a tree")
    step: StepSettings = Field(StepSettings(), description="what a reasoning step is")
    answer: AnswerSettings = Field(AnswerSettings(), description="how answers are found and checked")


class RankConfig(Config):
    """Settings of ``rank``, which asks people to rank completions on a page."""

    raters: int = Field(1, ge=1, description="number of people who rank or skip each prompt")
    enough: int | None = Field(
        None, ge=1, description="the stage goes on when people have answered so many prompts; default: all"
    )
    pairwise: bool = Field(False, description="show two completions at a time instead of all those of a prompt")
    wait: Literal["auto", "always", "never"] = Field(
        "auto",
        description="wait for people while the page is open; never: exit with code 3 instead; auto: wait in a terminal",
    )
    host: str = Field("127.0.0.1", description="address at which the page listens")
    port: int = Field(0, ge=0, le=65535, description="port of the page; 0 takes a free one")


class ScoreConfig(Config):
    """Settings of ``score``, which scores completions that exist with the stage's rewards. It has none of its own."""


class FilterConfig(Config):
    """Settings of ``filter``, which keeps rows that pass."""

    function: str = Field(
        description="file.py:name (beside the recipe) or package.module:name of a function of a row's columns; it "
        "returns True for a row that passes, and False or the reason for one that does not"
    )


PLACE = "{principle}"
"""Stands for the text of the principle in a request."""


class ExampleMessage(Config):
    """A message of a worked example: ``{role: user, content: "Describe your neighbor."}``."""

    role: Literal["user", "assistant"]
    content: str = Field(min_length=1)


class ReviseConfig(Config):
    """Settings of ``revise``, in which a model critiques and revises answers by the principles of a constitution."""

    constitution: str | list[Principle] | None = Field(
        None,
        description="the principles: a YAML file beside the recipe, or a list of {name:, critique:, revise:}; default: "
        "the constitution that comes with Burnish",
    )
    revisions: int = Field(
        4, ge=1, description="revisions of each answer, each by another principle, which is drawn at random"
    )
    critique_request: str = Field(
        "Critique your last answer. {principle} Write at most three sentences, and do not rewrite the answer yet.",
        description="what the user says to ask for a critique; {principle} stands for the principle's text critique",
    )
    revision_request: str = Field(
        "{principle} Write only the new answer, without any comment.",
        description="what the user says to ask for a revision; {principle} stands for the principle's text revise",
    )
    critique_tokens: int | None = Field(
        None, ge=1, description="maximum number of tokens of a critique; default: generation.max_new_tokens"
    )
    examples: list[ExampleMessage] = Field(
        [],
        description="messages before every request for a critique or a revision, as a worked example: a question, an "
        "answer, the request for a critique, the critique, the request for a revision, the revision",
    )

    @model_validator(mode="after")
    def _usable(self) -> Self:
        """Reject requests without the principle, and examples that are no conversation."""
        for name in ("critique_request", "revision_request"):
            if PLACE not in getattr(self, name):
                raise ValueError(f"{name} must contain {PLACE}, where the text of the principle goes")
        turns = [message.role for message in self.examples]
        if turns != ["user", "assistant"] * (len(turns) // 2):
            raise ValueError("examples must alternate between user and assistant, and end with the assistant")
        return self

    def principles(self) -> tuple[Principle, ...]:
        """The principles of the constitution.

        Raises:
            UserError: the file cannot be read, a principle lacks critique or revise, or there are too few of them.
        """
        uses = ("critique", "revise")
        if isinstance(self.constitution, list):
            check_principles(self.constitution, uses, [f"constitution.{i}" for i in range(len(self.constitution))])
            principles = tuple(self.constitution)
        else:
            principles = load_constitution(self.constitution, uses)
        if self.revisions > len(principles):
            raise UserError(
                f"revisions: {self.revisions}, but the constitution has {len(principles)} principles, each of which "
                f"is used at most once for a row: expected at most {len(principles)}"
            )
        return principles


class JudgeConfig(Config):
    """Settings of ``judge``, in which a judge labels pairs or scores samples."""

    judge: JudgeSettings = Field(description="who judges: {model: ...} or {url: ..., name: ...}")
    principles: Principles = Field(
        None,
        description="what to judge by: a list of texts, or a YAML file of principles with compare: beside the recipe; "
        "labels are averaged over them. Default: helpful, correct and harmless",
    )
    pointwise: bool = Field(
        False,
        description="grade each completion of a pair by itself instead of comparing the two; p_chosen is then the "
        "probability that the chosen one has the higher grade, plus half of that of equal grades",
    )
    pairs: Literal["all", "adjacent", "best_worst"] = Field(
        "all",
        description="rankings: which completions of a prompt are compared; adjacent: neighbors in the order of their "
        "scores; best_worst: the first and the last of this order",
    )
    clamp: float | None = Field(
        None,
        gt=0,
        lt=0.5,
        description="limit p_chosen to 0.5 + clamp, for judges that reason and are too certain afterwards (0.1)",
    )
    ties: Literal["keep", "drop"] = Field("keep", description="pairs whose p_chosen is exactly 0.5")
    on_failure: Literal["stop", "skip"] = Field(
        "stop", description="a row on which the judge gives no verdict after all retries; skip counts and lists it"
    )

    def principle_texts(self) -> tuple[str, ...]:
        """The texts of the principles; () for the default.

        Raises:
            UserError: the file cannot be read, or a principle has no ``compare``.
        """
        return principle_texts(self.principles)


class EvalConfig(Config):
    """Settings of ``eval``, which measures a model."""

    against: ModelSource | None = Field(
        None, description="a second model, measured on the same rows with the same seeds; differences are paired"
    )
    reference: ModelSource | None = Field(
        None, description="the reference policy of the KL and of the implicit rewards of pairs"
    )
    resamples: int = Field(2000, gt=0, le=1_000_000, description="number of bootstrap samples for each 95 % interval")


class RewardConfig(Config):
    """Settings of reward modelling."""

    centering: float = Field(0.0, ge=0, description="weight of (r_chosen + r_rejected)^2, which keeps scores near 0")


class DPOConfig(Config):
    """Settings of the DPO family. A setting that the chosen loss does not use is an error."""

    loss: PreferenceLoss | Literal["kto"] = Field(
        "sigmoid", description="preference loss; sigmoid is DPO, and kto learns from single answers"
    )
    beta: float = Field(0.1, gt=0, description="how closely the policy stays to the reference (simpo: about 2)")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="assumed fraction of wrong labels")
    average: bool = Field(False, description="average log-probabilities over tokens (simpo and orpo always do)")
    gamma: float = Field(0.5, ge=0, description="simpo: target margin between the two answers of a pair")
    orpo_weight: float = Field(0.1, ge=0, description="orpo: lambda, the weight of the odds-ratio term")
    nll_weight: float = Field(0.0, ge=0, description="weight of the chosen answers' NLL per token (RPO)")
    desirable_weight: float = Field(1.0, ge=0, description="kto: weight of good answers")
    undesirable_weight: float = Field(1.0, ge=0, description="kto: weight of bad answers")
    reference: Literal["precomputed", "live"] = Field(
        "precomputed",
        description="reference log-probabilities; precomputed: computed once and cached on disk; live: computed "
        "at every optimizer step",
    )

    @model_validator(mode="after")
    def _read(self) -> Self:
        """Reject settings that the chosen loss would ignore."""
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
                raise ValueError(f"loss {self.loss} does not use {name}: remove this key")
        return self

    @property
    def averaged(self) -> bool:
        """Whether log-probabilities are averaged over tokens."""
        return self.average or self.loss in WITHOUT_REFERENCE


class DistillConfig(Config):
    """Settings of distillation from a larger model."""

    teacher: ModelSource = Field(description="the model to learn from; it must have the student's tokenizer")
    divergence: Divergence | Literal["sampled"] = Field(
        "reverse",
        description="forward: KL(teacher || student); reverse: KL(student || teacher); jensen_shannon: between them; "
        "sampled: the reverse KL, estimated from the sampled tokens alone",
    )
    beta: float = Field(
        0.5, gt=0, lt=1, description="jensen_shannon: weight of the teacher; near 0 like forward, near 1 like reverse"
    )
    temperature: float = Field(1.0, gt=0, description="divisor of the logits of both models in the divergence")
    max_sampler_mismatch: float | None = Field(
        None,
        gt=0,
        description="prompts: stop the run if sampler and trainer log-probabilities differ by more than this, in nats "
        "per token; default: 0.05, and 0.2 in half precision",
    )
    show_every: int = Field(5, ge=1, description="prompts: optimizer steps between tables of sample completions")

    @model_validator(mode="after")
    def _read(self) -> Self:
        """Reject settings that the chosen divergence would ignore."""
        if "beta" in self.model_fields_set and self.divergence != "jensen_shannon":
            raise ValueError(f"divergence {self.divergence} does not use beta: remove this key")
        check_temperature(self.temperature)
        return self


class StepValueConfig(Config):
    """Settings of step-level value models."""

    alpha: float = Field(0.1, ge=0, description="weight of the value loss (squared error)")
    head_learning_rate: float | None = Field(
        None, gt=0, description="learning rate of the value head; default: that of the stage"
    )
    learn: Literal["steps", "everything"] = Field(
        "steps", description="steps: train on the tokens of correct solutions; everything: train on their questions too"
    )
    learn_eos: bool = Field(True, description="train on the token that ends a correct solution")
    delimiter: str = Field("\n", min_length=1, description="text that ends a reasoning step, in training and in search")
    mask_output: bool = Field(
        True, description="the output of a step's code (output in its row) and the delimiter after it are not learned"
    )


# --- policy gradient ----------------------------------------------------------------------------------------------
# Four blocks choose the policy loss, the advantage estimator, the reduction and the critic. A block without a name
# keeps that of the preset.

OWN = "<file.py:name>"


class ReinforceLoss(Config):
    """-A log p, without a ratio: suited to one optimizer step per batch of rollouts."""

    name: Literal["reinforce"]
    floor: float | None = Field(None, lt=0, description="never push a token's log-probability below this value")
    unlikelihood: bool = Field(False, description="use -log(1 - p) instead of log p where the advantage is negative")

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.floor is not None and self.unlikelihood:
            raise ValueError("floor and unlikelihood both bound the effect of negative advantages: choose one")
        return self


DualClip = Annotated[
    float | None, Field(gt=1, description="bound on the loss of tokens with a negative advantage, as a multiple of |A|")
]


class ClipLoss(Config):
    """PPO's loss with a clipped ratio."""

    name: Literal["clip"]
    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(0.2, ge=0)
    dual_clip: DualClip = None


class GSPOLoss(Config):
    """The clipped loss with one ratio per sequence. ``gspo_token`` allows a separate advantage for each token."""

    name: Literal["gspo", "gspo_token"]
    clip_low: float = Field(3e-4, ge=0, le=1, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(4e-4, ge=0)
    dual_clip: DualClip = None


class CISPOLoss(Config):
    """The log-probability, weighted by a ratio with an upper bound."""

    name: Literal["cispo"]
    clip_high: float | None = Field(4.0, ge=0, description="the weight is at most 1 + clip_high; null: no bound")
    dual_clip: DualClip = None


class SAPOLoss(Config):
    """A smooth gate instead of the clip."""

    name: Literal["sapo"]
    tau_positive: float = Field(1.0, gt=0, description="how fast the gate closes where the advantage is positive")
    tau_negative: float = Field(1.05, gt=0, description="how fast the gate closes where the advantage is negative")
    dual_clip: DualClip = None


class OwnFunction(Config, extra="allow"):
    """A function that the user wrote, ``my_loss.py:name`` or ``package.module:name``. Other keys are its arguments."""

    name: str


class GAE(Config):
    """Generalized advantage estimation. Requires a critic."""

    name: Literal["gae"]
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalized advantage estimation")
    whiten: bool = Field(True, description="normalize advantages to mean 0 and variance 1 over the batch")


class Compared(Config):
    """An estimator without a critic, which compares completions with each other (see ``math.advantages``)."""

    name: Baseline


class Reduction(Config):
    """A mean over all tokens, or over sequences of the mean or the sum of their tokens (see ``math.reductions``)."""

    name: Literal["token_mean", "sequence_mean", "sequence_sum"]


class FixedLength(Config):
    """The sum over each sequence, divided by a constant, averaged over sequences."""

    name: Literal["fixed_length"]
    length: int | None = Field(None, ge=1, description="the constant; default: the longest allowed completion")


class NoCritic(Config):
    """No critic."""

    name: Literal["none"]


class Critic(Config):
    """A model that predicts returns: its own network (separate) or a value head on the policy (shared)."""

    name: Literal["separate", "shared"]
    start: Literal["auto", "policy"] = Field(
        "auto", description="separate: initialize from a causal reward model if there is one, otherwise from the policy"
    )
    frozen: bool = Field(False, description="never update the critic")
    learning_rate: float | None = Field(None, gt=0, description="default: the policy's")
    warmup: int = Field(0, ge=0, description="number of initial iterations that train only the critic")
    coef: float = Field(0.5, ge=0, description="weight of the value loss")
    clip: float | None = Field(None, gt=0, description="clip range of the value update, in units of score")

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.warmup and (self.frozen or not self.coef):
            raise ValueError(
                f"critic.warmup {self.warmup} would train nothing: critic.frozen is set or critic.coef is 0"
            )
        if self.name == "shared" and "start" in self.model_fields_set and self.start != "auto":
            raise ValueError("critic.start applies only to a separate critic; a shared critic is a new value head")
        return self


def _tag(value: Any) -> str | None:
    """The discriminator of a block: its name, or ``OWN`` for a user's function."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return OWN if isinstance(name, str) and ":" in name else f"<{name}>"


def _choice(*classes: type[Config], own: bool = True) -> Any:
    """A union of these classes, selected by the block's name."""
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
    ReductionChoice = Reduction | FixedLength | OwnFunction
    CriticChoice = NoCritic | Critic
else:
    PolicyLoss = _choice(ReinforceLoss, ClipLoss, GSPOLoss, CISPOLoss, SAPOLoss)
    Advantage = _choice(GAE, Compared)
    ReductionChoice = _choice(Reduction, FixedLength)
    CriticChoice = _choice(NoCritic, Critic, own=False)


class Correction(Config):
    """Importance weights that correct for differences between sampler and trainer: ``{mode: truncate, cap: 2}``."""

    mode: Literal["truncate", "mask"]
    level: Literal["token", "sequence"] = Field("token", description="compute the ratio per token or per completion")
    cap: float = Field(2.0, gt=0, description="truncate: the maximum weight")
    low: float = Field(0.5, ge=0, description="mask: smaller ratios get weight 0")
    high: float = Field(2.0, gt=0, description="mask: larger ratios get weight 0")

    @model_validator(mode="after")
    def _read(self) -> Self:
        unread = {"cap"} if self.mode == "mask" else {"low", "high"}
        for name in sorted(unread & self.model_fields_set):
            raise ValueError(f"mode {self.mode} does not use {name}: remove this key")
        if self.mode == "mask" and self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class Overlong(Config):
    """Soft penalty on completions that come close to max_new_tokens (DAPO): ``{buffer: 64, penalty: 1}``."""

    buffer: int = Field(ge=1, description="number of tokens before max_new_tokens over which the penalty grows from 0")
    penalty: float = Field(
        1.0, gt=0, description="penalty of a completion with max_new_tokens tokens, in units of score"
    )


Epochs = Annotated[int, Field(ge=1, description="passes over each batch of rollouts")]
KLCoef = Annotated[
    float, Field(ge=0, description="weight of the KL to the reference model; 0 needs no reference model")
]
KLIn = Annotated[
    Literal["reward", "loss"], Field(description="whether the KL to the reference is part of the reward or of the loss")
]
KLEstimate = Annotated[Estimate, Field(description="estimator of the KL per token")]
KeepReference = Annotated[
    bool, Field(description="keep the initial policy as a reference and log the KL to it, even if kl_coef is 0")
]


def _abbreviated(schema: dict[str, Any]) -> None:
    """Allow a block to be just a name, or settings without a name."""
    schema["anyOf"] = [{"type": "string"}, {"type": "object", "not": {"required": ["name"]}}, *schema.pop("oneOf")]


LossBlock = Annotated[
    PolicyLoss,
    Field(description="policy loss: its name and settings", json_schema_extra=_abbreviated),
]
AdvantageBlock = Annotated[
    Advantage,
    Field(description="advantage estimator: its name and settings", json_schema_extra=_abbreviated),
]
ReductionBlock = Annotated[
    ReductionChoice,
    Field(description="how token losses become one number: name and settings", json_schema_extra=_abbreviated),
]
CriticBlock = Annotated[
    CriticChoice,
    Field(description="critic, which predicts returns: its name and settings", json_schema_extra=_abbreviated),
]


class PolicyGradientConfig(Config):
    """Settings of every method that learns from its own completions. The presets below change the defaults.

    A batch has ``per_device_train_batch_size`` prompts, and each mini-batch is one optimizer step.
    """

    policy_loss: LossBlock = ReinforceLoss.model_validate({"name": "reinforce"})
    advantage: AdvantageBlock = Compared.model_validate({"name": "none"})
    critic: CriticBlock = NoCritic.model_validate({"name": "none"})
    reduction: ReductionBlock = Reduction.model_validate({"name": "sequence_sum"})
    iterations: int | None = Field(
        None, ge=1, description="number of batches of prompts to train on; default: those of trainer.num_train_epochs"
    )
    epochs: Epochs = 1
    mini_batches: int = Field(
        1, ge=1, description="optimizer steps per pass; must divide the number of rollouts in a batch"
    )
    target_kl: float | None = Field(
        None, gt=0, description="stop the update once the approximate KL exceeds 1.5 x this value"
    )
    kl_coef: KLCoef = 0.0
    kl_in: KLIn = "reward"
    kl_estimate: KLEstimate = "k1"
    kl_target: float | None = Field(
        None, gt=0, description="adapt kl_coef to keep the KL near this value, in nats per completion"
    )
    kl_horizon: float = Field(10000, gt=0, description="number of rollouts over which kl_coef adapts")
    reference: KeepReference = False
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    correction: Correction | None = Field(
        None, description="reweight tokens whose probabilities differ between sampler and trainer"
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="sample up to this many batches ahead, while the policy is updated, with weights that are as many "
        "updates old; needs a generator in another process",
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        description="how many times per batch to replace prompts whose completions all have the same score",
    )
    missing_eos: Literal["none", "subtract", "replace"] = Field(
        "none", description="how to penalize the score of a completion that was cut off"
    )
    missing_eos_penalty: float | None = Field(
        None, description="missing_eos: the amount to subtract from the score, or the score that replaces it"
    )
    overlong: Overlong | None = Field(None, description="soft penalty on long completions")
    score_clip: float | None = Field(None, gt=0, description="clip scores to [-score_clip, score_clip]")
    score_scale: float = Field(1.0, gt=0, description="factor applied to scores before clipping")
    score_normalize: bool = Field(
        False,
        description="subtract the mean of all scores so far from scores and divide by their standard deviation, before "
        "scaling and clipping",
    )
    whiten_rewards: bool = Field(
        False, description="scale token rewards to variance 1 over the batch, keeping their mean"
    )
    evaluation: Literal["sampled", "greedy"] = Field("sampled", description="how to complete held-out prompts")
    max_sampler_mismatch: float | None = Field(
        None,
        gt=0,
        description="stop the run if sampler and trainer log-probabilities differ by more than this, in nats per "
        "token; default: 0.05, and 0.2 in half precision",
    )
    show_every: int = Field(5, ge=1, description="iterations between tables of sample completions")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """``critic: shared`` means ``critic: {name: shared}``. A block without a name keeps the preset's name."""
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
        """The reasons why these settings contradict each other."""
        loss, estimator, critic = self.policy_loss, self.advantage, self.critic
        if isinstance(estimator, GAE) and isinstance(critic, NoCritic):
            yield (
                "advantage gae needs a critic, but critic is none: set critic to shared or separate, or choose another "
                "advantage, such as rloo"
            )
        if isinstance(estimator, Compared) and isinstance(critic, Critic):
            yield (
                f"critic {critic.name} would be trained but never used, because advantage {estimator.name} does not "
                "read its values: set critic: none or advantage: gae"
            )
        if isinstance(loss, ReinforceLoss) and self.epochs * self.mini_batches > 1:
            key = "epochs" if self.epochs > 1 else "mini_batches"
            yield (
                f"{key} {getattr(self, key)}: after the first optimizer step the rollouts are off-policy, and "
                "policy_loss reinforce does not correct for that: set policy_loss to clip, or to another loss with a "
                "ratio"
            )
        if self.kl_coef and not self.reference and "reference" in self.model_fields_set:
            yield f"kl_coef {self.kl_coef} needs a reference model: set kl_coef to 0 or reference to true"
        if self.kl_target and not self.kl_coef:
            yield "kl_target multiplies kl_coef by a factor, so a kl_coef of 0 stays 0: set kl_coef above 0"
        if self.kl_in == "loss" and self.kl_coef and self.kl_estimate == "k1":
            yield "kl_estimate k1 has no gradient as a loss: set k2 (reverse KL) or k3 (forward KL)"
        if self.kl_in == "loss" and self.kl_target:
            yield "kl_target adapts the coefficient of the KL in the reward: set kl_in: reward"
        if self.missing_eos != "none" and self.missing_eos_penalty is None:
            yield f"missing_eos: {self.missing_eos} needs a value: set missing_eos_penalty"


BLOCKS = {"policy_loss", "advantage", "reduction", "critic"}


# The presets. Settings that a preset does not list keep the defaults of PolicyGradientConfig.


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    policy_loss: LossBlock = ClipLoss.model_validate({"name": "clip"})
    advantage: AdvantageBlock = GAE.model_validate({"name": "gae"})
    critic: CriticBlock = Critic.model_validate({"name": "separate"})
    reduction: ReductionBlock = Reduction.model_validate({"name": "token_mean"})
    epochs: Epochs = 4
    kl_coef: KLCoef = 0.05
    reference: KeepReference = True


class ReinforceConfig(PolicyGradientConfig):
    """Settings of REINFORCE. Settings of rollouts and updates apply to prompts only, not to scored rows."""

    learn_eos: bool = Field(True, description="scored rows: also train on the token that ends a turn")


class RLOOConfig(PolicyGradientConfig):
    """Settings of RLOO."""

    advantage: AdvantageBlock = Compared.model_validate({"name": "rloo"})
    kl_coef: KLCoef = 0.05


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    policy_loss: LossBlock = ClipLoss.model_validate({"name": "clip"})
    advantage: AdvantageBlock = Compared.model_validate({"name": "group_std"})
    reduction: ReductionBlock = Reduction.model_validate({"name": "sequence_mean"})
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
    """Each preset's defaults for the settings that differ between presets: {"rloo": {"advantage": "rloo", ...}}."""
    fields = PolicyGradientConfig.model_fields
    defaults = {
        name: {key: getattr(default := config.model_fields[key].default, "name", default) for key in fields}
        for name, config in PRESETS.items()
    }
    different = [key for key in fields if len({str(values[key]) for values in defaults.values()}) > 1]
    return {name: {key: values[key] for key in different} for name, values in defaults.items()}
