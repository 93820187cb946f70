"""Trained models as files of ONNX Runtime and OpenVINO, with a runner that needs no torch."""

from tost.deploy.graphs import plain_operators
from tost.deploy.write import Exported, export

__all__ = ["Exported", "export", "plain_operators"]
