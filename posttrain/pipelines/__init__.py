"""Pipelines: lists of stages that resume after a kill. The commands are such lists; write your own likewise."""

from posttrain.pipelines.stage import Stage, run_stages
from posttrain.pipelines.stages import Generate, RunHarness, Score, Select, Train

__all__ = ["Generate", "RunHarness", "Score", "Select", "Stage", "Train", "run_stages"]
