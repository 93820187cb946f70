"""Saved folders carry a module that imports this package, for programs that do not: ``trust_remote_code``."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tost.integrations.transformers  # noqa: F401  comes before transformers

# isort: split
from transformers import dynamic_module_utils

from tests.integrations.transformers.models import make, tokens
from tost.integrations.transformers import TostConfig, TostForCausalLM, TostForSequenceClassification, TostModel

CLASSES = {
    "AutoConfig": TostConfig,
    "AutoModel": TostModel,
    "AutoModelForCausalLM": TostForCausalLM,
    "AutoModelForSequenceClassification": TostForSequenceClassification,
}


def test_the_module_of_a_folder_leads_to_the_classes_of_this_package(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = make("plus")
    model.save_pretrained(tmp_path / "model")
    named = json.loads((tmp_path / "model/config.json").read_text())["auto_map"]
    assert set(named) == set(CLASSES)
    for auto, kind in CLASSES.items():
        found = dynamic_module_utils.get_class_from_dynamic_module(named[auto], str(tmp_path / "model"))
        assert found is kind
        found.register_for_auto_class(auto)  # as the auto classes do
    # What was loaded like this is saved like everything else: the source of the package stays where it is.
    model.save_pretrained(tmp_path / "again")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("model", "again")]
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_program_that_does_not_import_this_package_loads_a_folder(tmp_path):
    model, ids = make("plus"), tokens(1, 5)
    model.save_pretrained(tmp_path / "model")
    torch.save(model(ids).logits, tmp_path / "logits.pt")
    code = (
        "import tost._torchvision\n"  # torchvision of the package index beside a CPU build of torch
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"folder, ids = {str(tmp_path)!r}, torch.tensor({ids.tolist()})\n"
        "assert 'tost.integrations' not in sys.modules\n"
        "model = AutoModelForCausalLM.from_pretrained(folder + '/model', trust_remote_code=True)\n"
        "assert torch.equal(model(ids).logits, torch.load(folder + '/logits.pt', weights_only=True))\n"
        "assert model.generate(ids, max_new_tokens=2).shape == (1, 7)\n"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)
