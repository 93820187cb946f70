"""Targets that hold tensors: run folders, models, generation state, the authors' checkpoints."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz.harness import Harness, one_file, one_of_many
from tost.errors import ConfigError

TINY = {"embed_dim": 8, "depth": 1, "num_heads": 2, "vocab_size": 11, "max_length": 4}
RUN = (
    *("model.embed_dim=8", "model.depth=1", "model.num_heads=2", "train.steps=1", "train.batch_size=4"),
    *("train.ema_decay=0.9", "evaluate.batch_size=4", "evaluate.batches=1", "data.workers=0"),
)


def safetensors(folder: Path) -> Harness:
    """Weights in safetensors, which a run starts from."""
    import torch
    from safetensors.torch import save

    from tost.train.checkpoint.model import load_initial

    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    model.add_module("head", torch.nn.Linear(3, 2))
    seeds = [save(model.state_dict()), save({"0.weight": torch.zeros(3, 2, dtype=torch.bfloat16)}, {"tost": "{}"})]
    return one_file(
        folder / "w.safetensors", lambda path: load_initial(model, str(path), print_nothing), seeds, ("BF16", "F8_E4M3")
    )


def print_nothing(line: str) -> None:
    """Receive a message and leave it at that."""


def model_folder(folder: Path) -> Harness:
    """Folders of saved models."""
    import tost
    from tost.train.checkpoint.files import MANIFEST, write_manifest
    from tost.train.checkpoint.model import load_model, save_model

    saved = folder / "model"
    save_model(tost.create_model("tost_lm_base", **TINY), saved)

    def prepare(file: Path) -> list[Path]:
        if file.name == MANIFEST:
            return []
        (saved / MANIFEST).unlink()  # whoever tampers with a file can write the manifest too
        write_manifest(saved)
        return [saved / MANIFEST]

    names = ("model.json", MANIFEST, "model.safetensors")
    return one_of_many(saved, names, lambda _: load_model(saved), prepare=prepare, words=("name", "options", "format"))


def resume(folder: Path) -> Harness:
    """Run folders, as a run reads its own to go on."""
    from tost.data import make_loader
    from tost.recipes import get_task, load_config
    from tost.train.checkpoint.files import MANIFEST, resolve_checkpoint, write_manifest
    from tost.train.checkpoint.state import RunState, restore_checkpoint
    from tost.train.config import dump_config
    from tost.train.loop import fit
    from tost.train.optim import WeightAverage, build_optimizer
    from tost.train.runfolder import RunFolder, changed_settings, check_changes

    config, out = load_config("demo/digits", RUN), folder / "run"
    task = get_task(config.recipe)
    fit(config, task, out)
    (out / "config.yaml").write_text(dump_config(config, comments=False))  # comments only take time
    for link in ("best", "last"):
        (out / "checkpoints" / link).unlink(missing_ok=True)
    checkpoint = out / "checkpoints" / "step-00000001"
    data = task.build_data(config)
    model = task.build_model(config, data)
    alone: Any = SimpleNamespace(accelerator=SimpleNamespace(scaler=None), rank=0, size=1)
    state = RunState(
        model=model,
        optimizer=build_optimizer(model, config.optim),
        average=WeightAverage(model, 0.9),
        loader=make_loader(data.train, batch_size=4, seed=0, rank=0, world_size=1, workers=0),
        fingerprint=data.info.fingerprint,
        processes=alone,
    )

    def prepare(file: Path) -> list[Path]:
        if file.parent != checkpoint or file.name == MANIFEST:
            return []
        (checkpoint / MANIFEST).unlink()
        write_manifest(checkpoint)
        return [checkpoint / MANIFEST]

    def parse(file: Path) -> None:
        if file.parent == checkpoint:
            restore_checkpoint(resolve_checkpoint(out, print_nothing), state)
        elif file.suffix == ".jsonl":
            RunFolder(out).drop_after(1)
        else:
            check_changes(changed_settings(out, config), checkpoint.name)

    files = ("state.json", "random-00000.json", MANIFEST, "optimizer.safetensors", "ema.safetensors")
    names = [*(f"checkpoints/{checkpoint.name}/{name}" for name in files), "metrics.jsonl", "config.yaml", "env.json"]
    return one_of_many(out, names, parse, prepare=prepare)


def state_file(folder: Path) -> Harness:
    """Files of generation state."""
    import torch

    import tost
    from tost.generation import generate_with_state, load_state, save_state

    torch.manual_seed(0)
    model = tost.create_model("tost_lm_base", **TINY).eval()
    generator = torch.Generator().manual_seed(0)
    done = generate_with_state(model, torch.tensor([[1, 2]]), max_new_tokens=1, generator=generator)
    save_state(folder / "seed", done.continuation, model, generator=generator)
    save_state(folder / "plain", done.continuation, model)

    def parse(path: Path) -> None:
        again = load_state(path, model, generator=torch.Generator())
        generate_with_state(model, None, state=again, max_new_tokens=1)

    seeds = [(folder / name).read_bytes() for name in ("plain", "seed")]
    return one_file(folder / "s.safetensors", parse, seeds)


def official(folder: Path) -> Harness:
    """The authors' checkpoints, in PyTorch's formats and in safetensors."""
    import torch
    from safetensors.torch import save

    import tost
    from tost.integrations.official import load_official, to_official

    language = to_official(tost.create_model("tost_lm_base", **TINY))
    small = {"embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}
    vision = to_official(tost.create_model("tost_tiny_patch16_224", **small))
    wrapped = {"model": language, "args": Namespace(lr=0.1, out="runs"), "epoch": 3}
    seeds = [save({name: tensor.clone() for name, tensor in language.items()})]
    for content, is_zip in ((wrapped, True), (vision, True), ({"model": language}, False)):
        stream = io.BytesIO()
        torch.save(content, stream, _use_new_zipfile_serialization=is_zip)
        seeds.append(stream.getvalue())
    words = (
        "model_ema",
        "state_dict",
        "module.",
        "cposix\nsystem\n",
        "cbuiltins\neval\n",
        "\x85R.",
        "ctorch\nTensor\n",
    )
    return one_file(folder / "checkpoint.pth", load_official, seeds, words)


def tokenizer(folder: Path) -> Harness:
    """The tokenizer in the folder of a run."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tost.data.text.tokenizers import HFTokenizer, read_tokenizer, save_tokenizer

    small = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    save_tokenizer(HFTokenizer(small, "small"), folder)

    def parse(_: Path) -> None:
        found = read_tokenizer(folder)
        if found is not None:
            found.decode(found.encode("ab"))

    return one_of_many(folder, ("tokenizer_record.json", "tokenizer.json"), parse, words=("bytes", "chars", "kind"))


def hf_folder(folder: Path) -> Harness:
    """Folders of models as transformers writes them."""
    from tost.integrations.transformers import TostConfig, TostForCausalLM

    saved, sizes = folder / "hf", {name: size for name, size in TINY.items() if name != "max_length"}
    TostForCausalLM(TostConfig(**sizes)).save_pretrained(saved)
    words = ("n_layer", "hidden_size", "auto_map", "torch_dtype", "_attn_implementation", "1e999", "null", "[]")

    def parse(file: Path) -> None:
        # Of the file itself transformers is the parser, and it compares the sizes of the weights.
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                return
            TostForCausalLM.from_pretrained(saved, local_files_only=True)
        except (OSError, RecursionError, RuntimeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(str(error) or "unreadable") from error

    return one_of_many(saved, ("config.json",), parse, words=words)
