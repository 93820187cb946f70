"""Token mixers by name: registration and options. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel

from tost._options import check_options, options_of_signature
from tost._plugins import Registry
from tost.errors import ConfigError
from tost.models.mixers.builtin import BUILTIN
from tost.models.mixers.spec import MixerSizes, MixerSpec, Place

if TYPE_CHECKING:
    pass

Class = TypeVar("Class", bound=Callable[..., Any])

# Arguments that the model decides. A mixer gets those that its constructor names; they are not options of the mixer.
_FROM_MODEL = frozenset(
    {"embed_dim", "num_heads", "max_length", "in_bias", "out_bias", "attn_drop", "gain_drop", "out_drop", "drop"}
    | {"position_bias", "backend", "device", "dtype"}
)


def register_mixer(
    name: str,
    *,
    options: type[BaseModel] | None = None,
    places: Sequence[Place] = ("vision", "sequence"),
    description: str = "",
    products: Callable[[MixerSizes, Any], int] | None = None,
) -> Callable[[Class], Class]:
    """Make a token mixer available as ``mixer=<name>`` in every model that has this option.

    The class is called as ``Class(embed_dim, num_heads, **options)``. If its constructor names `max_length`, `in_bias`,
    `out_bias`, `attn_drop`, `out_drop` or `backend`, it gets the model's choice of these as well. Its modules are
    called as ``mixer(x, mask)``, from tokens ``[B, N, C]`` and a bool mask ``[B, N]`` of the real ones, or None, to
    ``[B, N, C]``.

    In a language model it has to be causal. To generate text it also needs ``forward_with_state(x, state, mask)``,
    which returns the output and the state after these tokens: a named tuple of tensors with the batch as their first
    axis, one of them ``position``, the number of tokens seen. Its type is the class attribute ``state_kind``.

    Args:
        name: What users call it.
        options: Pydantic class of its options; by default they are the arguments of its constructor.
        places: Kinds of models that it fits: ``"vision"``, ``"sequence"``, ``"language"``.
        description: One line for listings.
        products: Returns the multiply-adds per token, from `tost.models.mixers.MixerSizes` and the options. Without it
            the arithmetic of models with this mixer is not counted.

    Returns:
        A decorator that registers a class and returns it as it is.

    Raises:
        ConfigError: The name is taken or cannot be a name, or there is no such place.

    Example:
        >>> import torch, tost
        >>> @tost.register_mixer("mean_of_all", description="the mean of all tokens, for each of them")
        ... class MeanOfAll(torch.nn.Module):
        ...     def __init__(self, embed_dim: int, num_heads: int, scale: float = 1.0) -> None:
        ...         super().__init__()
        ...         self.scale = scale
        ...
        ...     def forward(self, x, mask=None):
        ...         return self.scale * x.mean(dim=1, keepdim=True).expand_as(x)
        >>> model = tost.create_model("tost_mini", mixer="mean_of_all", mixer_options={"scale": 0.5})
    """
    if unknown := [place for place in places if place not in get_args(Place)]:
        raise ConfigError(
            f"there is no place {unknown[0]!r} for a mixer; the places are: {', '.join(get_args(Place))}."
        )

    def register(found: Class) -> Class:
        spec = _adapt(name, found) if options is None else MixerSpec(name=name, build=found, options=options)
        MIXERS.add(name, replace(spec, places=tuple(places), description=description, products=products))
        return found

    return register


def list_mixers(pattern: str = "*", *, place: Place | None = None) -> list[str]:
    """List the registered mixers.

    Args:
        pattern: Which ones, with the wildcards of a shell.
        place: Only those that fit this kind of models. Mixers of other packages that have not been loaded are listed.

    Returns:
        Names in alphabetical order.
    """
    names = MIXERS.names(pattern)
    if place is None:
        return names
    return [name for name in names if (spec := MIXERS.peek(name)) is None or spec.form(place) is not None]


def mixer_spec(name: str) -> MixerSpec:
    """Return what is registered under a name.

    Raises:
        ConfigError: There is no such mixer; the message suggests one.
    """
    return MIXERS.get(name)


def find_mixer(name: str, place: Place) -> MixerSpec:
    """Return the form of a mixer that fits a kind of models.

    Raises:
        ConfigError: There is no such mixer, or it does not fit.
    """
    form = mixer_spec(name).form(place)
    if form is None:
        raise ConfigError(
            f"mixer {name!r} does not fit {place} models; those that do: {', '.join(list_mixers(place=place))}."
        )
    return form


def mixer_problems(spec: MixerSpec, given: Mapping[str, Any], *, official: bool = False) -> list[str]:
    """Return what is wrong with the options of a mixer, one sentence each; see `MixerSpec.validate`."""
    _, problems = check_options(spec.options, spec.filled(given, official=official), prefix="mixer_options.")
    other = f"; if it is an option of another mixer than {spec.name}, clear them all with mixer_options=null"
    return [f"{one.key}: {one.text}{other if one.text.startswith('unknown') else ''}" for one in problems]


def _adapt(name: str, found: Any) -> MixerSpec:
    """Make a spec of the class that an entry point or ``package.module:Class`` refers to."""
    if (spec := MIXERS.renamed(name, found)) is not None:
        return spec
    if not callable(found):
        raise ConfigError(f"mixer {name!r} refers to {found!r}, which is not a class.")
    causal = hasattr(found, "forward_with_state")
    return MixerSpec(
        name=name,
        build=found,
        options=options_of_signature(found, skip=_FROM_MODEL),
        places=("language",) if causal else ("vision", "sequence"),
    )


def _columns(spec: MixerSpec) -> dict[str, str]:
    return {"models": ", ".join(place for place in get_args(Place) if spec.form(place) is not None)}


MIXERS: Registry[MixerSpec] = Registry("mixer", "tost.mixers", _adapt, BUILTIN, columns=_columns)
