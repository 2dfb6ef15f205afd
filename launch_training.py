"""Launches training as the original tinker-atropos did; also installed as `tinker-atropos-launch`."""

from __future__ import annotations

from tinker_atropos_atropos.launch import command, load_config, main, parse_args

__all__ = ["command", "load_config", "main", "parse_args"]

if __name__ == "__main__":
    command()
