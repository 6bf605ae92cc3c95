"""`python -m posttrain` is the command `posttrain`."""

from posttrain.cli.main import run_process

run_process()
