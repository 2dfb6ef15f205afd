"""What every plugin of a kind must hold to; `tinker_atropos.testing` is the public door."""
