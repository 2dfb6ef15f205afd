"""Adapter `atropos`: the Atropos protocol, foreign Atropos scripts as environments, the original's drop-ins."""
