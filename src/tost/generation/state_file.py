"""Save and load generation state as a safetensors file. Nothing in such a file is ever run.

The file holds tensors and, as JSON in its header, the version of the format and which model they belong to. The
structure of the state is not taken from the file but from the model, by letting it read a token or two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tost._io import write_atomic
from tost.errors import CheckpointError, ConfigError, StorageError
from tost.generation.decode import State, check_causal, context_limit, device_of, evaluating
from tost.generation.stream import Continuation
from tost.models.options import saved_options

FORMAT = "tost-continuation"
VERSION = 1
"""What is written; a change that older code would misread makes it larger."""
OLDEST_VERSION = 1
"""What can still be read."""
# Choices that change how a model computes or trains, not what it computes.
_IRRELEVANT = ("backend", "dropout", "gradient_checkpointing")
_SAMPLES = 32  # numbers per tensor that tell weights apart


def save_state(
    path: str | Path, continuation: Continuation, model: nn.Module, *, generator: torch.Generator | None = None
) -> None:
    """Save a generation state.

    Args:
        path: The file; one that is there is replaced, whole or not at all.
        continuation: From `generate_with_state` or a `TokenStream`.
        model: The model that made it.
        generator: Source of randomness, whose position is saved too.

    Raises:
        StorageError: The file cannot be written.

    Example:
        >>> import tempfile, torch, tost
        >>> from tost.generation import generate_with_state, load_state, save_state
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> done = generate_with_state(model, torch.randint(256, (1, 10)), max_new_tokens=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state(f"{folder}/text.safetensors", done.continuation, model)
        ...     again = load_state(f"{folder}/text.safetensors", model)
        >>> bool(torch.equal(again.last, done.continuation.last))
        True
    """
    tensors = {"last": continuation.last, "seen": _pack(continuation.seen)}
    tensors |= {f"state.{index}": leaf for index, leaf in enumerate(_tensors(continuation.state))}
    if generator is not None:
        tensors["generator"] = generator.get_state()
    description = {"format": f"{FORMAT}-{VERSION}", "model": _describe(model), "weights": _weights_mark(model)}
    # Copies, because the format refuses tensors that share memory.
    dense = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    if not Path(path).parent.is_dir():
        raise StorageError(f"cannot write the state to {path}: there is no folder {Path(path).parent}")
    try:
        write_atomic(Path(path), save(dense, metadata={"tost": json.dumps(description)}))
    except OSError as error:
        raise StorageError(f"cannot write the state to {path}: {error}") from error


def load_state(path: str | Path, model: nn.Module, *, generator: torch.Generator | None = None) -> Continuation:
    """Load a generation state of `save_state`.

    Args:
        path: The file.
        model: The model that made it, or one with the same options and weights.
        generator: Continues from the saved position of the generator, if there is one.

    Returns:
        The continuation, on the device of the model.

    Raises:
        CheckpointError: There is no such file, it is something else, or it belongs to another model.
    """
    tensors, description = _read(Path(path))
    _check_model(Path(path), description, model)
    try:
        state = _rebuild(tensors, model)
        last, seen = tensors["last"], _unpack(tensors["seen"], check_causal(model).options.vocab_size)
        if last.dtype != torch.int64 or last.dim() != 1 or len(last) != len(seen):
            raise ValueError("the last tokens are not one per text")
        if bool(((last < 0) | (last >= seen.shape[1])).any()):
            raise ValueError("a last token is not in the vocabulary")
        if generator is not None and "generator" in tensors:
            generator.set_state(tensors["generator"])
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} does not hold the state of a text: {error}") from error
    device = device_of(model)
    state = pytree.tree_map_only(Tensor, lambda x: x.to(device), state)
    return Continuation(state, last.to(device), seen.to(device))


def _describe(model: nn.Module) -> dict[str, Any]:
    """Return the options that define the meaning of a state."""
    options: dict[str, Any] = check_causal(model).options.model_dump(mode="json")
    return {"class": type(model).__name__, **{key: options[key] for key in sorted(options) if key not in _IRRELEVANT}}


def _weights_mark(model: nn.Module) -> str:
    """Return a hash of a few numbers of every tensor, which catches mistakes, not malice."""
    digest = hashlib.sha256()
    for name, tensor in sorted((_first_name(name), tensor) for name, tensor in model.state_dict().items()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].double().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def _first_name(parameter: str) -> str:
    """Return the name of a parameter in version 1 of the format, which marks weights by it."""
    return parameter.replace(".conv.weight", ".local.weight").replace(".conv_mlp.weight", ".local_mlp.weight")


def _check_model(path: Path, description: Mapping[str, Any], model: nn.Module) -> None:
    ours, schema = _describe(model), type(check_causal(model).options)
    # An option that the file does not mention came later; what was written before has its default.
    defaults = {key: schema.model_fields[key].default for key in ours if key in schema.model_fields}
    try:
        saved = defaults | saved_options(description["model"], schema)
    except ConfigError as error:
        raise CheckpointError(f"{path} belongs to another model: {error}") from error
    if saved != ours:
        keys = [key for key in sorted({*saved, *ours}) if saved.get(key) != ours.get(key)]
        changes = ", ".join(f"{key} {saved.get(key)} instead of {ours.get(key)}" for key in keys)
        raise CheckpointError(f"{path} belongs to another model: {changes}. Use the model that the text was made with.")
    if description["weights"] != _weights_mark(model):
        raise CheckpointError(
            f"{path} belongs to other weights of the same model, such as another checkpoint of the run. Use the "
            "weights that the text was made with."
        )


def _rebuild(tensors: Mapping[str, Tensor], model: nn.Module) -> State | None:
    """Return the state in the form that the model gives its own."""
    count = sum(name.startswith("state.") for name in tensors)
    if count == 0:
        return None
    found = [tensors[f"state.{index}"] for index in range(count)]
    shorter, longer = (_example(model, tokens) for tokens in (1, 2))
    if not _is_like(found, _tensors(shorter), _tensors(longer)) or {len(x) for x in found} != {len(tensors["last"])}:
        raise ValueError("its tensors are not those of this model's state")
    rest = iter(found)
    state = pytree.tree_map_only(Tensor, lambda _: next(rest), shorter)
    position = getattr(state, "position", None)
    if position is not None and bool((position < 1).any()):
        raise ValueError("a text has no token")
    return state


def _example(model: nn.Module, tokens: int) -> State:
    """Return the state of a model after some tokens, in its most general form: as if there might be padding."""
    limit = context_limit(model)
    ids = torch.zeros(1, tokens if limit is None else min(tokens, limit), dtype=torch.int64)
    ids = ids.to(device_of(model))
    with torch.no_grad(), evaluating(model):
        return check_causal(model).forward_with_state(ids, None, torch.ones_like(ids, dtype=torch.bool))[1]


def _is_like(found: Sequence[Tensor], shorter: Sequence[Tensor], longer: Sequence[Tensor]) -> bool:
    """Return whether tensors have the form of two examples; an axis along which these differ grows with the text."""
    if len(found) != len(shorter):
        return False
    lengths: set[int] = set()
    for leaf, one, two in zip(found, shorter, longer, strict=True):
        if leaf.dtype != one.dtype or leaf.dim() != one.dim():
            return False
        for size, before, after in zip(leaf.shape[1:], one.shape[1:], two.shape[1:], strict=True):
            if before == after and size != before:
                return False
            if before != after:
                lengths.add(size)
    return len(lengths - {0}) <= 1  # without padding there is no list of what is padding


def _tensors(state: State | None) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def _pack(seen: Tensor) -> Tensor:
    """Store eight flags in a byte."""
    padded = F.pad(seen.to(torch.uint8), (0, -seen.shape[1] % 8)).view(len(seen), -1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=seen.device)).sum(dim=2, dtype=torch.uint8)


def _unpack(packed: Tensor, size: int) -> Tensor:
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != (size + 7) // 8:
        raise ValueError("the list of tokens that came before does not fit the vocabulary")
    flags = (packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1
    return flags.flatten(1)[:, :size].bool()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; give one that was written by `tost generate --save-state`")
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {}).get("tost", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error}); a pickle is never opened") from error
    _check_format(path, description.get("format") if isinstance(description, dict) else None)
    if not isinstance(description.get("model"), dict) or not isinstance(description.get("weights"), str):
        raise CheckpointError(f"{path} does not say which model and weights it belongs to")
    return tensors, description


def _check_format(path: Path, found: object) -> None:
    name, _, version = str(found).rpartition("-")
    if name != FORMAT or not version.isdecimal():
        raise CheckpointError(
            f"{path} does not hold the state of a text: its format is {found}, needed is {FORMAT}-{VERSION}"
        )
    if int(version) > VERSION:
        raise CheckpointError(
            f"{path} was written by a newer version of tost: its format is {found}, and this version reads up to "
            f"{FORMAT}-{VERSION}. Upgrade tost."
        )
    if int(version) < OLDEST_VERSION:
        raise CheckpointError(
            f"{path} was written by an older version of tost: its format is {found}, and this version reads "
            f"{FORMAT}-{OLDEST_VERSION} and later. Generate the text again, or use that version."
        )
