from tost.train.config import RunConfig as RunConfig
from tost.train.config import config_hash as config_hash
from tost.train.config import dump_config as dump_config
from tost.train.config import load_config as load_config
from tost.train.loop import RunResult as RunResult
from tost.train.loop import fit as fit
from tost.train.task import Outcome as Outcome
from tost.train.task import Task as Task
