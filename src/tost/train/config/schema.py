"""The schema of a run's configuration: which keys exist, what they mean and in which unit. Loads no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from tost._options import check_options, defaults_of, options_error
from tost.data import DataOptions
from tost.models import model_spec
from tost.train.config.rules import broken_rules


def _no_boolean(value: Any) -> Any:
    # In Python, True is the number 1; in a configuration it is a mistake.
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a number")
    return value


# The bounds stand inside, so that messages and `tost cat` know them.
_NUMBER = BeforeValidator(_no_boolean)
_MOST = 10**12  # a step of a nanosecond would take a quarter of an hour; more is a slip of the finger
_Count = Annotated[int, Field(ge=0, le=_MOST), _NUMBER]
_PositiveCount = Annotated[int, Field(ge=1, le=_MOST), _NUMBER]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), _NUMBER]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _NUMBER]
_Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _NUMBER]
_Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), _NUMBER]
_Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER]
_Seed = Annotated[int, Field(ge=0, lt=2**32), _NUMBER]


def _key(default: Any, description: str, **bounds: Any) -> Any:
    """Return a field that may be left out."""
    return Field(default, description=description, **bounds)


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
    seed: _Seed = _key(0, "seed of weights, data order and dropout")
    batch_size: _PositiveCount = Field(description="samples (sequences or images) per step, over all processes")
    accumulate: _PositiveCount = _key(1, "micro-batches that a step consists of, to save memory")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = _key(
        "auto",
        "arithmetic of the model, while weights, statistics and optimizer stay fp32; auto: bf16 where the device has "
        "instructions for it, or else fp32; a run stores and keeps what was chosen",
    )
    clip_norm: _Positive | None = _key(None, "largest Euclidean norm of the whole gradient; null: no limit")
    clip_value: _Positive | None = _key(None, "largest magnitude of any entry of the gradient; null: no limit")
    init_from: str | None = _key(
        None,
        "weights to start from: a run, a checkpoint, a converted model, a .safetensors file; null: random",
        min_length=1,
    )
    new_head: bool = _key(False, "start with a random head even if init_from has one of as many classes")
    ema_decay: _Fraction | None = _key(
        None, "share of itself that an average of the weights keeps per step; null: no average"
    )
    chunk: _PositiveCount | None = _key(
        None,
        "tokens of a text that are processed at a time, in memory that does not grow with its length; gradients are "
        "those of the whole text; null: all of them",
    )
    truncate: _PositiveCount | None = _key(
        None, "pieces of train.chunk tokens after which gradients are cut off; null: never, they are exact"
    )
    hide: _Share | None = _key(
        None, "share of the elements of a sequence or patches of an image that masked_prediction hides; null: none"
    )
    max_minutes: _Positive | None = _key(
        None, "minutes after which this start of the run evaluates, saves and stops; null: no limit"
    )
    compile: bool = _key(False, "run the model through torch.compile")
    deterministic: bool = _key(True, "refuse algorithms whose result may differ from run to run")


class OptimConfig(_Section):
    """The optimizer."""

    name: Literal["adamw"] = _key("adamw", "Adam with decoupled weight decay")
    lr: _Positive = Field(description="learning rate at the peak of the schedule")
    slow_lr: _Positive | None = _key(
        None, "the same for slow parameters of a model, the state matrices of S4; null: lr"
    )
    betas: tuple[_Fraction, _Fraction] = _key((0.9, 0.999), "decay per step of the gradient's first and second moment")
    eps: _Positive = _key(1e-8, "added to the root of the second moment")
    weight_decay: _NonNegative = _key(
        0.0, "share of a weight removed per step and unit of learning rate; matrices only"
    )
    decay_all: bool = _key(False, "decay every parameter: biases, norms, scales, tokens too")
    decay_statistics: bool = _key(
        False, "decay temperatures and position biases too, as the authors' vision training did"
    )


class ScheduleConfig(_Section):
    """The learning rate over time. Below, t counts the steps done, w is the warm-up.

    `epoch_steps` and `lag` describe loops that set the rate once per epoch, before or after it: a step of epoch e then
    has the rate that the schedule gives for the beginning of epoch ``max(0, e - lag)``.
    """

    name: Literal["cosine", "linear", "inverse_sqrt", "one_cycle", "constant"] = _key(
        "constant",
        "form after the warm-up; inverse_sqrt is lr sqrt(w/t); one_cycle is linear from lr/25 to lr to lr/250000",
    )
    warmup_steps: _Count = _key(0, "steps w until the learning rate is at its peak")
    warmup_first_step: Literal["one", "zero"] = _key(
        "one",
        "how the warm-up counts its first step; one: lr (t+1)/(w+1), as nanoGPT; "
        "zero: warmup_from + (lr - warmup_from) t/w, as fairseq and older nanoGPT",
    )
    warmup_from: _NonNegative = _key(0.0, "learning rate at t = 0, where that counts as zero")
    min_lr: _NonNegative = _key(0.0, "learning rate that cosine, linear and inverse_sqrt end at")
    decay_from: Literal["warmup", "start"] = _key(
        "warmup", "where cosine and linear begin: where the warm-up ends, or at t = 0, hidden by it, as in timm"
    )
    epoch_steps: _Count = _key(
        0, "steps of an epoch, if the learning rate changes only between epochs; 0: at every step"
    )
    lag: _Count = _key(0, "epochs by which the learning rate stays behind")


class RegularizeConfig(_Section):
    """What training does to images and labels against over-fitting; recipes for images know this section."""

    label_smoothing: _Fraction = _key(0.0, "share of every target that is spread evenly over all classes, in training")
    mixup: _NonNegative = _key(0.0, "alpha of the Beta distribution of Mixup's weights; 0: no Mixup")
    cutmix: _NonNegative = _key(0.0, "alpha of the Beta distribution of the area that CutMix leaves; 0: no CutMix")
    mix_prob: _Probability = _key(1.0, "how often a batch is mixed at all")
    switch_prob: _Probability = _key(0.5, "how often a batch that is mixed gets CutMix, where both are on")


class CheckpointConfig(_Section):
    """When the state of the run is saved. It also is at the end, and when the run is interrupted."""

    every: _PositiveCount = _key(1000, "steps between checkpoints")
    keep: _PositiveCount = _key(2, "newest checkpoints that are kept, besides the best one")
    best_metric: str | None = _key(
        None, "validation metric whose best checkpoint is kept too; null: none", min_length=1
    )
    best_mode: Literal["min", "max"] = _key("min", "whether the lowest or the highest value is best")


class EvaluateConfig(_Section):
    """When and how the model is measured on the validation set. It also is at the end."""

    every: _Count = _key(0, "steps between evaluations; 0: only at the end")
    batches: _PositiveCount | None = _key(None, "validation batches that each process takes; null: the whole set")
    batch_size: _PositiveCount | None = _key(None, "samples per validation batch and process; null: train.batch_size")
    weights: Literal["average", "raw"] = _key(
        "average", "what is measured during training; average: if train.ema_decay keeps one"
    )
    telemetry: bool = _key(False, "log the compression term of the coding rate by layer as well")


class LogConfig(_Section):
    """Log lines and trackers."""

    every: _PositiveCount = _key(10, "steps between log lines")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = _key(
        (), "programs that receive the metrics too; [] for none"
    )


class ParallelConfig(_Section):
    """How several processes share the work. One process ignores all of this."""

    strategy: Literal["ddp", "fsdp"] = _key(
        "ddp", "ddp: every process holds the whole model; fsdp: the processes share it out"
    )
    context: _PositiveCount = _key(1, "processes that share one sequence; divides their number")


class RunConfig(_Section):
    """Everything that defines a run."""

    recipe: str = Field(min_length=1, description="task to train; `tost ls tasks` lists them")
    model: ModelConfig = Field(description="the model")
    data: DataOptions = Field(description="the data set")
    train: TrainConfig = Field(description="length, batch, arithmetic")
    optim: OptimConfig = Field(description="the optimizer")
    schedule: ScheduleConfig = _key(ScheduleConfig(), "the learning rate over time")
    regularize: RegularizeConfig = _key(RegularizeConfig(), "smoothing and mixing of images")
    checkpoint: CheckpointConfig = _key(CheckpointConfig(), "saving the state")
    evaluate: EvaluateConfig = _key(EvaluateConfig(), "measuring on the validation set")
    log: LogConfig = _key(LogConfig(), "log lines and trackers")
    parallel: ParallelConfig = _key(ParallelConfig(), "sharing the work of several processes")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        name = self.model.name
        given = default_options(name, self.data, self.model.options) | self.model.options
        options, wrong = check_options(model_spec(name).options, given)
        if options is None:
            raise options_error(f"model {name!r} cannot be built with these options", wrong)
        object.__setattr__(self, "model", ModelConfig(name=name, options=options.model_dump(mode="json")))
        if problems := list(broken_rules(self.value)):
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


def default_options(name: str, data: DataOptions | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a model has if none is given: what the data demands, else what is registered.

    Args:
        name: Registered model.
        data: The data; None if it is not known.
        given: Options that are given; another mixer has other defaults.

    Raises:
        ConfigError: There is no such model.
    """
    spec, demanded = model_spec(name), data.shape().model_options() if data else {}
    known = {key: value for key, value in demanded.items() if key in spec.options.model_fields}
    return defaults_of(spec.options) | spec.defaults_for(given) | known
