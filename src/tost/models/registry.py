"""Models by name: registration, options, construction. Loads no torch until a model is built.

A model is a ``torch.nn.Module`` that is called according to its task:

* ``classification``: ``model(x) -> logits [B, K]`` from ids ``[B, N]`` or values ``[B, N, F]``; ``model(x, mask=mask)``
  if the data has padding, with True for real elements.
* ``image_classification``: ``model(images) -> logits [B, K]`` from ``[B, channels, height, width]``.
* ``language_modeling``: ``model(ids) -> logits [B, N, V]``, and ``model(ids, targets=targets)``, which returns the
  cross-entropy summed over all targets but -100. To generate, ``forward_with_state(ids, state, mask)``, as in
  `LanguageToST`, and ``options`` with `vocab_size` and `max_length`.

Everything else is optional: ``options``, ``flops_per_token()``, ``flops_per_image(height, width)``, and for the
optimizer ``no_weight_decay()`` and ``slow_parameters()``, the names of parameters that do not decay or that learn at
``optim.slow_lr``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from tost._options import check_options, options_error, options_of_signature
from tost._plugins import Registry
from tost.errors import ConfigError
from tost.models.presets import IMAGE_MODELS, LANGUAGE_MODELS, SEQUENCE_MODELS, ModelSpec

if TYPE_CHECKING:
    from torch import nn

_OPTIONS = "_tost_options"
"""Attribute for the options of a model that does not keep them itself."""
Factory = TypeVar("Factory", bound=Callable[..., Any])


def register_model(
    name: str,
    *,
    tasks: Sequence[str] | None = None,
    options: type[BaseModel] | None = None,
    defaults: Mapping[str, Any] | None = None,
    description: str = "",
) -> Callable[[Factory], Factory]:
    """Make a model available by name, to `create_model`, in configurations and on the command line.

    It is any ``torch.nn.Module`` with the interface of its tasks; see `tost.models.registry`.

    Args:
        name: What users call it.
        tasks: The tasks that it can be trained for, such as ``("classification",)``; None for any.
        options: Pydantic class of its options. The class or function is then called with one object of it. By default
            the options are its arguments, checked by their annotations and passed by keyword.
        defaults: Options that differ from the defaults of the class or of the arguments.
        description: One line for listings.

    Returns:
        A decorator that registers a class or function and returns it as it is.

    Raises:
        ConfigError: The name is taken or cannot be a name.

    Example:
        >>> import torch, tost
        >>> @tost.register_model("mean_of_pixels", tasks=("image_classification",))
        ... class MeanOfPixels(torch.nn.Module):
        ...     def __init__(self, num_classes: int, in_chans: int = 3) -> None:
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(in_chans, num_classes)
        ...
        ...     def forward(self, images):
        ...         return self.head(images.mean(dim=(2, 3)))
        >>> tost.create_model("mean_of_pixels", num_classes=10)(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """
    if isinstance(tasks, str):
        raise ConfigError(f"tasks of model {name!r} are {tasks!r}; give a tuple, such as ({tasks!r},).")

    def register(found: Factory) -> Factory:
        spec = _adapt(name, found) if options is None else ModelSpec(name=name, build=found, options=options)
        fitting = None if tasks is None else tuple(tasks)
        MODELS.add(name, replace(spec, tasks=fitting, defaults=dict(defaults or {}), description=description))
        return found

    return register


def list_models(pattern: str = "*", *, task: str | None = None) -> list[str]:
    """List the registered models.

    Args:
        pattern: Which ones, with the wildcards of a shell.
        task: Only those known to be for this task. Models of other packages that have not been loaded are left out.

    Returns:
        Names in alphabetical order.

    Example:
        >>> import tost
        >>> tost.list_models("gpt2_*")
        ['gpt2_base', 'gpt2_large', 'gpt2_medium']
    """
    names = MODELS.names(pattern)
    if task is None:
        return names
    known = {name: spec for name in names if (spec := MODELS.peek(name)) is not None}
    return [name for name, spec in known.items() if spec.tasks is None or task in spec.tasks]


def loaded_models() -> list[ModelSpec]:
    """Return all registered models, without unloaded ones of other packages."""
    return MODELS.loaded()


def model_spec(name: str) -> ModelSpec:
    """Return the spec that is registered under a name.

    Raises:
        ConfigError: There is no such model; the message suggests one.
    """
    return MODELS.get(name)


def model_options(name: str, overrides: Mapping[str, Any]) -> BaseModel:
    """Check the options of a model without building it, and without torch.

    Args:
        name: A registered model.
        overrides: Options that replace the model's own.

    Returns:
        All options of the model.

    Raises:
        ConfigError: There is no such model, or the options are not usable; every problem is in the message.
    """
    spec = model_spec(name)
    options, problems = check_options(spec.options, {**spec.defaults_for(overrides), **overrides})
    if options is None:
        raise options_error(f"model {name!r} cannot be built with these options", problems)
    return options


def create_model(name: str, **overrides: Any) -> nn.Module:
    """Build a model with fresh weights.

    Device and dtype are torch's defaults; ``with torch.device("meta"):`` builds a model of any size at once.

    Args:
        name: A registered model, see `list_models`.
        **overrides: Options that replace the model's own; they are the fields of ``model.options``.

    Returns:
        The model. Its ``options`` are all the choices that made it.

    Raises:
        ConfigError: There is no such model, or the options are not usable; every problem is in the message.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> model(torch.randint(256, (1, 10))).shape
        torch.Size([1, 10, 256])
    """
    options = model_options(name, overrides)
    model = model_spec(name).create(options)
    object.__setattr__(model, _OPTIONS, options)
    return model


def model_options_of(model: nn.Module) -> BaseModel | None:
    """Return the options of a model: its ``options``, else those that `create_model` made it with; None if unknown."""
    own = getattr(model, "options", None)
    return own if isinstance(own, BaseModel) else getattr(model, _OPTIONS, None)


def flops_per_token(model: nn.Module) -> int | None:
    """Return the operations of a forward pass per token, from ``model.flops_per_token()``; None if unknown."""
    return _counted(model, "flops_per_token")


def flops_per_image(model: nn.Module, height: int, width: int) -> int | None:
    """Return the operations of a forward pass for an image, from ``model.flops_per_image``; None if unknown."""
    return _counted(model, "flops_per_image", height, width)


def _counted(model: nn.Module, method: str, *arguments: int) -> int | None:
    count = getattr(model, method, None)
    try:
        found: int | None = count(*arguments) if callable(count) else None
    except NotImplementedError:
        return None
    return found


def _adapt(name: str, found: Any) -> ModelSpec:
    """Make a spec of the class or function that an entry point or ``package.module:Class`` refers to."""
    if (spec := MODELS.renamed(name, found)) is not None:
        return spec
    if not callable(found):
        raise ConfigError(f"model {name!r} refers to {found!r}, which is neither a class nor a function.")
    return ModelSpec(name=name, build=found, options=options_of_signature(found), by_keyword=True)


_BUILT_IN = (*IMAGE_MODELS, *LANGUAGE_MODELS, *SEQUENCE_MODELS)
MODELS: Registry[ModelSpec] = Registry(
    "model", "tost.models", _adapt, _BUILT_IN, columns=lambda spec: {"tasks": ", ".join(spec.tasks or ("any",))}
)
