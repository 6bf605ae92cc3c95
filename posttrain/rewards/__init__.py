"""Rewards: functions of users, built-in verifiers and services, run where they cannot hurt the run."""
