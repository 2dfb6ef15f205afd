"""The contract tests, as public API: run them from your own tests."""

from __future__ import annotations

from tinker_atropos.contract_tests.control import check_control
from tinker_atropos.contract_tests.environment import ContractViolated, check_environment
from tinker_atropos.contract_tests.ledger import Ledger, LedgerViolated, check_ledger
from tinker_atropos.contract_tests.state import check_state
from tinker_atropos.contract_tests.trainer import check_trainer

__all__ = [
    "ContractViolated",
    "Ledger",
    "LedgerViolated",
    "check_control",
    "check_environment",
    "check_ledger",
    "check_state",
    "check_trainer",
]
