"""Environment variables between a run and the scripts that it starts. Imports nothing: scripts read it too."""

CONFIG_VARIABLE = "TINKER_ATROPOS_SCRIPT_CONFIG"
"""Tells a script's process where the configuration lies that was written for it."""
