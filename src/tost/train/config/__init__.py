"""Run configuration: schema, reading, validation and writing. Loads no torch."""

from tost.train.config.dump import dump_config
from tost.train.config.read import load_config
from tost.train.config.schema import (
    CheckpointConfig,
    EvaluateConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RegularizeConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    config_hash,
)

__all__ = [
    "CheckpointConfig",
    "EvaluateConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RegularizeConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "config_hash",
    "dump_config",
    "load_config",
]
