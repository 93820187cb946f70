"""The schema of a run's configuration: which keys exist, what they mean and in which unit. Loads no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from tost._options import check_options, options_error
from tost.data import DataOptions, find_data
from tost.models import model_spec
from tost.train.config.rules import RULES, broken_rules


def _no_boolean(value: Any) -> Any:
    # In Python, True is the number 1; in a configuration it is a mistake.
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a number")
    return value


# The bounds stand inside, so that messages and `tost cat` know them.
_NUMBER = BeforeValidator(_no_boolean)
_Count = Annotated[int, Field(ge=0), _NUMBER]
_PositiveCount = Annotated[int, Field(ge=1), _NUMBER]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), _NUMBER]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _NUMBER]
_Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _NUMBER]
_Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER]
_Seed = Annotated[int, Field(ge=0, lt=2**32), _NUMBER]


class _Section(BaseModel):
    """Section of a configuration: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Section):
    """The model: the name of a registered one, and its options.

    In a file the options stand beside the name. As part of a `RunConfig` they are complete: an option that was not
    given is what the data demands, such as the number of classes, or else what is registered under the name.

    Attributes:
        name: Registered name.
        options: Value by name of the option.
    """

    name: str = Field(description="registered model; `tost ls models` lists them")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the model")

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "name" not in values:
            return values
        if isinstance(values.get("options"), Mapping) and len(values) == 2:
            return values  # the class's own form
        return {"name": values["name"], "options": {key: values[key] for key in values if key != "name"}}

    @model_serializer
    def _flatten(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}


class TrainConfig(_Section):
    """How long, with how much data per step, in which arithmetic."""

    steps: _PositiveCount = Field(description="optimizer steps of the whole run")
    seed: _Seed = Field(default=0, description="seed of weights, data order and dropout")
    batch_size: _PositiveCount = Field(description="samples (sequences or images) per step, over all processes")
    accumulate: _PositiveCount = Field(default=1, description="micro-batches that a step consists of, to save memory")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="arithmetic of the model; weights and optimizer stay fp32"
    )
    clip_norm: _Positive | None = Field(
        default=None, description="largest Euclidean norm of the whole gradient; null: no limit"
    )
    clip_value: _Positive | None = Field(
        default=None, description="largest magnitude of any entry of the gradient; null: no limit"
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="weights to start from: a run, a checkpoint, a converted model, a .safetensors file; null: random",
    )
    new_head: bool = Field(
        default=False, description="start with a random head even if init_from has one of as many classes"
    )
    ema_decay: _Fraction | None = Field(
        default=None, description="share of itself that an average of the weights keeps per step; null: no average"
    )
    compile: bool = Field(default=False, description="run the model through torch.compile")
    deterministic: bool = Field(default=True, description="refuse algorithms whose result may differ from run to run")


class OptimConfig(_Section):
    """The optimizer."""

    name: Literal["adamw"] = Field(default="adamw", description="Adam with decoupled weight decay")
    lr: _Positive = Field(description="learning rate at the peak of the schedule")
    slow_lr: _Positive | None = Field(
        default=None, description="the same for slow parameters of a model, the state matrices of S4; null: lr"
    )
    betas: tuple[_Fraction, _Fraction] = Field(
        default=(0.9, 0.999), description="decay per step of the gradient's first and second moment"
    )
    eps: _Positive = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: _NonNegative = Field(
        default=0.0, description="share of a weight removed per step and unit of learning rate; matrices only"
    )
    decay_all: bool = Field(default=False, description="decay every parameter: biases, norms, scales, tokens too")
    decay_statistics: bool = Field(
        default=False, description="decay temperatures and position biases too, as the authors' vision training did"
    )


class ScheduleConfig(_Section):
    """The learning rate over time. Below, t counts the steps done, w is the warm-up.

    `epoch_steps` and `lag` describe loops that set the rate once per epoch, before or after it: a step of epoch e then
    has the rate that the schedule gives for the beginning of epoch ``max(0, e - lag)``.
    """

    name: Literal["cosine", "linear", "inverse_sqrt", "one_cycle", "constant"] = Field(
        default="constant",
        description="form after the warm-up; inverse_sqrt is lr sqrt(w/t); "
        "one_cycle is linear from lr/25 to lr to lr/250000",
    )
    warmup_steps: _Count = Field(default=0, description="steps w until the learning rate is at its peak")
    warmup_first_step: Literal["one", "zero"] = Field(
        default="one",
        description="how the warm-up counts its first step; one: lr (t+1)/(w+1), as nanoGPT; "
        "zero: warmup_from + (lr - warmup_from) t/w, as fairseq and older nanoGPT",
    )
    warmup_from: _NonNegative = Field(default=0.0, description="learning rate at t = 0, where that counts as zero")
    min_lr: _NonNegative = Field(default=0.0, description="learning rate that cosine, linear and inverse_sqrt end at")
    decay_from: Literal["warmup", "start"] = Field(
        default="warmup",
        description="where cosine and linear begin: where the warm-up ends, or at t = 0, hidden by it, as in timm",
    )
    epoch_steps: _Count = Field(
        default=0, description="steps of an epoch, if the learning rate changes only between epochs; 0: at every step"
    )
    lag: _Count = Field(default=0, description="epochs by which the learning rate stays behind")


class RegularizeConfig(_Section):
    """What training does to images and labels against over-fitting; recipes for images know this section."""

    label_smoothing: _Fraction = Field(
        default=0.0, description="share of every target that is spread evenly over all classes, in training"
    )
    mixup: _NonNegative = Field(
        default=0.0, description="alpha of the Beta distribution of Mixup's weights; 0: no Mixup"
    )
    cutmix: _NonNegative = Field(
        default=0.0, description="alpha of the Beta distribution of the area that CutMix leaves; 0: no CutMix"
    )
    mix_prob: _Probability = Field(default=1.0, description="how often a batch is mixed at all")
    switch_prob: _Probability = Field(
        default=0.5, description="how often a batch that is mixed gets CutMix, where both are on"
    )


class CheckpointConfig(_Section):
    """When the state of the run is saved. It also is at the end, and when the run is interrupted."""

    every: _PositiveCount = Field(default=1000, description="steps between checkpoints")
    keep: _PositiveCount = Field(default=2, description="newest checkpoints that are kept, besides the best one")
    best_metric: str | None = Field(
        default=None, min_length=1, description="validation metric whose best checkpoint is kept too; null: none"
    )
    best_mode: Literal["min", "max"] = Field(
        default="min", description="whether the lowest or the highest value is best"
    )


class EvaluateConfig(_Section):
    """When and how the model is measured on the validation set. It also is at the end."""

    every: _Count = Field(default=0, description="steps between evaluations; 0: only at the end")
    batches: _PositiveCount | None = Field(
        default=None, description="validation batches that each process takes; null: the whole set"
    )
    batch_size: _PositiveCount | None = Field(
        default=None, description="samples per validation batch and process; null: train.batch_size"
    )
    weights: Literal["average", "raw"] = Field(
        default="average", description="what is measured during training; average: if train.ema_decay keeps one"
    )
    telemetry: bool = Field(default=False, description="log the compression term of the coding rate by layer as well")


class LogConfig(_Section):
    """Log lines and trackers."""

    every: _PositiveCount = Field(default=10, description="steps between log lines")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="programs that receive the metrics too; [] for none"
    )


class ParallelConfig(_Section):
    """How several processes share the work. One process ignores all of this."""

    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="ddp: every process holds the whole model; fsdp: the processes share it out"
    )
    context: _PositiveCount = Field(default=1, description="processes that share one sequence; divides their number")


class RunConfig(_Section):
    """Everything that defines a run."""

    recipe: str = Field(min_length=1, description="task to train; `tost ls tasks` lists them")
    model: ModelConfig = Field(description="the model")
    data: DataOptions = Field(description="the data set")
    train: TrainConfig = Field(description="length, batch, arithmetic")
    optim: OptimConfig = Field(description="the optimizer")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="the learning rate over time")
    regularize: RegularizeConfig = Field(default=RegularizeConfig(), description="smoothing and mixing of images")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="saving the state")
    evaluate: EvaluateConfig = Field(default=EvaluateConfig(), description="measuring on the validation set")
    log: LogConfig = Field(default=LogConfig(), description="log lines and trackers")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="sharing the work of several processes")

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        name = self.model.name
        given = default_options(name, self.data) | self.model.options
        options, wrong = check_options(model_option_class(name), given)
        if options is None:
            raise options_error(f"model {name!r} cannot be built with these options", wrong)
        object.__setattr__(self, "model", ModelConfig(name=name, options=options.model_dump(mode="json")))
        if not (info.context or {}).get("skip_rules") and (problems := list(broken_rules(RULES, self.value))):
            raise ValueError("; ".join(f"{problem.key}: {problem.text}" for problem in problems))
        return self

    def value(self, key: str) -> Any:
        """Return the value of a dotted key, such as ``train.steps``; None for an option that the model lacks."""
        section, _, name = key.partition(".")
        if section == "model" and name not in ("", "name"):
            return self.model.options.get(name)
        return getattr(getattr(self, section), name) if name else getattr(self, section)


def config_hash(config: RunConfig) -> str:
    """Return a fingerprint of 12 hexadecimal digits; equal for two configurations whose values are all equal."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def model_option_class(name: str) -> type[BaseModel]:
    """Return the class of a model's options.

    Raises:
        ConfigError: There is no such model.
    """
    return model_spec(name).options


def data_option_class(name: str) -> type[BaseModel]:
    """Return the class of a data set's options.

    Raises:
        ConfigError: There is no such data set.
    """
    return find_data(name).options


def default_options(name: str, data: DataOptions | None) -> dict[str, Any]:
    """Return the options that a model has if none is given: what the data demands, else what is registered.

    Args:
        name: Registered model.
        data: The data; None if it is not known.

    Raises:
        ConfigError: There is no such model.
    """
    fields = model_option_class(name).model_fields
    registered = {
        key: field.get_default(call_default_factory=True) for key, field in fields.items() if not field.is_required()
    }
    demanded = data.shape().model_options() if data else {}
    return registered | dict(model_spec(name).defaults) | {key: demanded[key] for key in demanded if key in fields}
