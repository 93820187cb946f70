from tost import analysis as analysis
from tost import models as models
from tost import nn as nn
from tost import objective as objective
from tost import ops as ops
from tost.analysis.registry import register_analysis as register_analysis
from tost.data.registry import register_data as register_data
from tost.generation import generate as generate
from tost.integrations.official import load_official as load_official
from tost.models import create_model as create_model
from tost.models import list_models as list_models
from tost.models import register_mixer as register_mixer
from tost.models import register_model as register_model
from tost.nn import CausalTSSAttention as CausalTSSAttention
from tost.nn import TSSAttention as TSSAttention
from tost.ops import Packing as Packing
from tost.ops import TSSAState as TSSAState
from tost.ops import available_backends as available_backends
from tost.ops import causal_membership as causal_membership
from tost.ops import causal_tssa as causal_tssa
from tost.ops import causal_tssa_step as causal_tssa_step
from tost.ops import causal_tssa_with_state as causal_tssa_with_state
from tost.ops import membership as membership
from tost.ops import tssa as tssa
from tost.recipes.registry import register_task as register_task
from tost.train.checkpoint.model import load_model as load_model

__version__: str
