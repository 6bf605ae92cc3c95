"""Pipelines: lists of stages that go on after a kill. The commands are lists of these; write your own likewise."""

from posttrain.pipelines.stage import Stage, run_stages
from posttrain.pipelines.stages import Generate, Score, Select, Train

__all__ = ["Generate", "Score", "Select", "Stage", "Train", "run_stages"]
