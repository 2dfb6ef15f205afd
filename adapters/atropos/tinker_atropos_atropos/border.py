"""What a run takes of a posted group, wherever it was posted: sizes that fit the model and the batch, no images."""

from __future__ import annotations

from dataclasses import dataclass

from tinker_atropos_atropos.convert import has_images
from tinker_atropos_atropos.posted import Posted


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a group can't be trained on: in few words, which are counted, and in full. `place` leads to the value."""

    reason: str
    place: tuple[str | int, ...]
    message: str


def unfit(posted: Posted, *, batch_size: int, context: int | None, images: bool = False) -> Unfit | None:
    """Return what this run can't take of a checked group, None where all is well.

    `batch_size` counts sequences, `context` tokens (None: not stated). `images`: the trainer takes some.
    """
    if has_images(posted) and not images:
        return Unfit("images", ("images",), "this run's trainer takes no images; post groups without them")
    if len(posted.tokens) > batch_size:
        return Unfit(
            "larger than a batch",
            ("tokens",),
            f"a group of {len(posted.tokens)} sequences never fits a batch of {batch_size}",
        )
    for index, row in enumerate(posted.tokens):
        if context is not None and len(row) > context:
            return Unfit(
                "longer than the context",
                ("tokens", index),
                f"{len(row)} tokens are more than the model's context of {context}",
            )
    return None
