"""`python -m tinker_atropos_local_tinker`: serve the Tinker API from this machine."""

from __future__ import annotations

from tinker_atropos_local_tinker.cli import command

if __name__ == "__main__":
    command(prog_name="tinker_atropos_local_tinker")
