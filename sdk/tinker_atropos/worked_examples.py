"""Shows a question with worked examples before it, as chat messages or as raw text. For environments of problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_atropos.trajectory import Message


@dataclass(frozen=True, slots=True)
class WorkedExamples:
    """Questions with their solutions; in raw text a question stands behind `asked:`, a solution behind `answered:`."""

    examples: Sequence[tuple[str, str]]
    asked: str
    answered: str

    def chat(self, question: str, *, instruction: str, system: str | None, shots: int) -> list[Message]:
        """Return the messages of a prompt: the system message, the first examples as earlier turns, the question."""
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        for example, solution in self.examples[:shots]:
            messages.append({"role": "user", "content": _instructed(example, instruction)})
            messages.append({"role": "assistant", "content": solution})
        messages.append({"role": "user", "content": _instructed(question, instruction)})
        return messages

    def completion(self, question: str, *, instruction: str, shots: int) -> str:
        """Return the raw text of a prompt: the instruction, the first examples, the question up to `answered:`."""
        parts: Sequence[str] = (
            *((instruction,) if instruction else ()),
            *(f"{self.asked}: {example}\n{self.answered}: {solution}" for example, solution in self.examples[:shots]),
            f"{self.asked}: {question}\n{self.answered}:",
        )
        return "\n\n".join(parts)


def _instructed(question: str, instruction: str) -> str:
    return f"{question}\n\n{instruction}" if instruction else question
