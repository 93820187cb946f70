"""The options of a language model as a configuration of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from transformers import GenerationConfig, PreTrainedConfig

from tost._io import write_atomic
from tost._text import closest
from tost.errors import ConfigError
from tost.models import LanguageOptions, model_options, model_spec
from tost.models.options import saved_options

RENAMED = {"max_length": "max_position_embeddings"}
"""Options whose name transformers uses for something else: a generation of at most `max_length` tokens."""
LEFT_OUT = {"gradient_checkpointing": "call model.gradient_checkpointing_enable()"}
"""Options that transformers sets by other means: they are about training, not about the model."""
_OPTIONS = {RENAMED.get(key, key): key for key in LanguageOptions.model_fields if key not in LEFT_OUT}
_BASE_MODEL = "tost_lm_base"
_GENERATION = "it is about generation; set it in model.generation_config or give it to generate()"
_HINTS = {
    **dict.fromkeys(GenerationConfig._get_default_generation_params(), _GENERATION),
    **{key: f"the number of positions is {name} here" for key, name in RENAMED.items()},
    **LEFT_OUT,
}
# What the base class takes without declaring it.
_TAKEN = {
    *("name_or_path", "output_attentions", "attn_implementation", "experts_implementation"),
    *("num_labels", "torch_dtype", "per_layer_config", "model_type"),
}
_CLASS_NAMES = {name for name in dir(PreTrainedConfig) if not name.startswith("_")}
_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_LABELS = 10**6

_MODULE = "modeling_tost"
_AUTO_CLASSES = {
    "AutoConfig": "TostConfig",
    "AutoModel": "TostModel",
    "AutoModelForCausalLM": "TostForCausalLM",
    "AutoModelForSequenceClassification": "TostForSequenceClassification",
}
_SOURCE = f'''"""Makes AutoConfig and AutoModel know this model, with trust_remote_code=True; needs the package tost."""

from tost.integrations.transformers import {", ".join(sorted(_AUTO_CLASSES.values()))}

__all__ = [{", ".join(f'"{name}"' for name in sorted(_AUTO_CLASSES.values()))}]
'''


def _fields() -> dict[str, Any]:
    """Return a class body that declares the options of a language model as fields of a dataclass."""
    known, chosen = LanguageOptions.model_fields, model_spec(_BASE_MODEL).defaults
    kinds = {name: known[key].annotation for name, key in _OPTIONS.items()}
    defaults = {name: chosen.get(key, known[key].default) for name, key in _OPTIONS.items()}
    mutable = {name: field(default_factory=value.copy) for name, value in defaults.items() if isinstance(value, dict)}
    return {"__annotations__": kinds, **defaults, **mutable}


_OptionFields: Any = type("_OptionFields", (PreTrainedConfig,), {**_fields(), "__module__": __name__})


class TostConfig(_OptionFields):  # type: ignore[misc]
    """The options of `tost.models.LanguageOptions`, one for one, under the same names.

    Two differ. ``max_length`` is called ``max_position_embeddings``, because transformers keeps that name for
    generation; ``gradient_checkpointing`` is left to ``model.gradient_checkpointing_enable()``. transformers' usual
    names work too: ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``tie_word_embeddings``. The
    defaults are those of ``tost_lm_base``.

    Values are checked by `LanguageOptions` when a configuration is made, when it is saved and when a model is built, so
    a value that was changed in between is found too. An unknown key is an error. In a file that was saved it
    is kept, because other programs leave theirs there, unless it looks like a misspelled option.

    Attributes:
        use_cache: Return the state with the logits, as generation needs it.
        skip_logits: In training with labels, return no logits: the loss is computed without ever holding all of them,
            which takes less memory than anything else in a small model with a large vocabulary.
        bos_token_id: Id of the token that begins a text; None if there is none.
        eos_token_id: Id of the token that ends a text, or several; None if there is none.
        pad_token_id: Id of the token that fills up a batch; None if there is none.

    Raises:
        ConfigError: The options are not usable; the message lists every problem.

    Example:
        >>> from tost.integrations.transformers import TostConfig
        >>> config = TostConfig(embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> config.num_hidden_layers, config.options().depth
        (2, 2)
    """

    model_type: ClassVar[str] = "tost"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "embed_dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
        "tie_word_embeddings": "tie_head",
    }

    use_cache: bool = True
    skip_logits: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take values that are no fields, and check all."""
        if self.transformers_version is not None:  # it was saved, perhaps by an earlier version
            kwargs = saved_options(kwargs, LanguageOptions)
        problems = self._unknown(kwargs)
        for name, key in self.attribute_map.items():
            if name in kwargs:
                setattr(self, key, kwargs.pop(name))
        for name in ("dtype", "torch_dtype"):
            value = kwargs.get(name, getattr(self, name, None))
            if (getattr(torch, value, value) if isinstance(value, str) else value) not in _DTYPES:
                problems.append(f"{name}: {value!r} is no floating-point type of torch; write for example float32")
        count, quantization = kwargs.get("num_labels"), kwargs.get("quantization_config")
        if isinstance(count, int) and count > _MOST_LABELS:
            problems.append(f"num_labels: {count} given; needs at most {_MOST_LABELS}")
        if not isinstance(kwargs.get("auto_map"), dict | None):
            problems.append(f"auto_map: {kwargs['auto_map']!r} given; needs a dictionary")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if quantization is not None and not isinstance(method, str):
            problems.append(f"quantization_config: {quantization!r} given; needs a dictionary with a quant_method")
        kwargs = {key: value for key, value in kwargs.items() if not key.endswith("_implementation")}
        self._check(problems)  # before transformers computes with the values
        try:
            super().__post_init__(**kwargs)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"this TostConfig describes no model:\n  {error}") from error

    @classmethod
    def from_options(cls, options: LanguageOptions, **kwargs: Any) -> TostConfig:
        """Return the configuration of a model with these options.

        Args:
            options: The options, such as ``model.options``.
            **kwargs: What else a configuration takes, such as `eos_token_id`.
        """
        values = {RENAMED.get(key, key): value for key, value in options.model_dump().items() if key not in LEFT_OUT}
        return cls(**values, **kwargs)

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> TostConfig:
        """Return the configuration of a registered language model, such as ``tost_lm_base_plus``.

        Args:
            name: One of ``tost.list_models()``.
            **overrides: Values that replace the model's own, under the names of this class.

        Raises:
            ConfigError: There is no such language model, or the values are not usable.
        """
        spec = model_spec(name)
        if spec.options is not LanguageOptions:
            raise ConfigError(
                f"{name!r} is no language model but {spec.description!r}; use one that "
                "`tost ls models '*lm*'` or `tost ls models 'gpt2*'` lists."
            )
        return cls(**{**{RENAMED.get(key, key): value for key, value in spec.defaults.items()}, **overrides})

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: saved folders name a module that imports this class, so its source is not copied into them."""

    def to_dict(self) -> dict[str, Any]:
        """Return all values, the sizes under transformers' usual names as well, where other libraries look for them."""
        values: dict[str, Any] = super().to_dict()
        return values | {name: values[key] for name, key in self.attribute_map.items()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the values that are written to a file, each under one name."""
        values: dict[str, Any] = super().to_diff_dict()
        return {key: value for key, value in values.items() if key not in self.attribute_map}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write ``config.json``, and beside it a module that imports this package.

        With it, programs that have never imported ``tost`` load the folder if they trust its code.

        Args:
            save_directory: Folder to write to; it is created.
            push_to_hub: Upload what was written.
            **kwargs: What else transformers takes, about the upload.

        Raises:
            ConfigError: The options are not usable; the message lists every problem.
        """
        self.options()
        self.auto_map = {auto: f"{_MODULE}.{name}" for auto, name in _AUTO_CLASSES.items()}
        write_atomic(Path(save_directory) / f"{_MODULE}.py", _SOURCE)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> TostConfig:
        """Return the configuration itself, whatever else a file holds."""
        return self

    def options(self) -> LanguageOptions:
        """Return the options as `tost.models` takes them.

        Raises:
            ConfigError: They are not usable; the message lists every problem.
        """
        return self._check([])

    def validate(self) -> None:
        """Check all values, as transformers does before it saves.

        Raises:
            ConfigError: They are not usable; the message lists every problem.
        """
        super().validate()  # a decorator puts it there
        self.options()

    @property
    def layer_types(self) -> list[str]:
        """Types of the layers in transformers' terms: linear attention has a state of constant size."""
        return ["full_attention" if self.mixer == "softmax" else "linear_attention"] * self.depth

    @property
    def context_limit(self) -> int | None:
        """Number of tokens after which there are no more positions; None if texts may be of any length."""
        return self.max_position_embeddings if self.position == "learned" else None

    def _check(self, problems: list[str]) -> LanguageOptions:
        """Return the options if there are no problems, neither those that were found nor others."""
        options = None
        try:
            options = model_options(_BASE_MODEL, {key: getattr(self, name) for name, key in _OPTIONS.items()})
        except ConfigError as error:
            message = str(error)
            for key, name in RENAMED.items():
                message = message.replace(key, name)
            problems = problems + [line.strip() for line in message.splitlines()[1:]]
        if problems or options is None:
            raise ConfigError("\n  ".join(["this TostConfig describes no model:", *problems]))
        return cast(LanguageOptions, options)

    def _unknown(self, given: Mapping[str, Any]) -> list[str]:
        """Return a problem for each key that is neither options nor anything that transformers takes."""
        saved = self.transformers_version is not None
        known = {*(field.name for field in fields(self)), *self.attribute_map, *_TAKEN}
        found = []
        for key in given:
            if key not in known and (callable(getattr(type(self), key, None)) or key in _CLASS_NAMES):
                found.append(f"{key}: a name of the class, which no value can have; remove it")
            if key in known or key.startswith("_"):
                continue
            near = closest(key, _OPTIONS, cutoff=0.8 if saved else 0.6)
            hint = f"did you mean {near!r}?" if near else _HINTS.get(key, "remove it")
            if near or not saved:
                found.append(f"{key}: not an option of the model; {hint}")
        return found
