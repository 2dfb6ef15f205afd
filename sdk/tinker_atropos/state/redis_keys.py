"""Every key that a run has in Redis, what it holds and how long it lives.

All keys of a run share the hash tag `{run}` and so the slot of a cluster. None expires: they live until `forget` of the
run, and together are bounded by the cap: at most `cap` items, and the ids of as many ended ones as `remembered(cap)`
says. One run has one cap; all who open it should give the same.

    …:{run}:meta     hash    `format` of these keys; `fence` the trainer's epoch, `fence_token` the call that began it;
                             `next` arrival of the newest item; `ended` count of ends; `ref` the newest policy, `refs`
                             how many there were; `rewound` the call that rewound last;
                             `note:…` a note of that name
    …:{run}:waiting  zset    id by arrival: what a lease may take
    …:{run}:leased   zset    id by arrival: what the trainer holds; back to `waiting` on a rewind
    …:{run}:items    hash    id to the item's bytes (see `codec`), until a commit or a discard
    …:{run}:known    hash    id to 32 hex digits, the call that put it, and once ended the reason; trimmed with `ended`
    …:{run}:ended    zset    id by order of ending, the oldest trimmed
    …:{run}:held     hash    id to the call that leased it, as long as it is leased
    …:{run}:leases   hash    call that leased, to how many of its items are still leased
    …:{run}:rewound  list    ids that the last rewind returned, in order

Channels, each message of which is "waiting leased fence refs"; they wake who waits, and nothing depends on them alone:

    …:{run}:items    items came, or came back, or a new epoch began
    …:{run}:room     items ended
    …:{run}:policy   a policy was published
"""

from __future__ import annotations

from urllib.parse import quote

PREFIX = "tinker-atropos"
FORMAT = "1"
NAMES = ("meta", "waiting", "leased", "items", "known", "ended", "held", "leases", "rewound")


class RunKeys:
    """The names of one run's keys: `all` of them in the order in which the scripts take them, and each by its name.

    `channels` is what the names of the channels begin with.
    """

    meta: str
    waiting: str
    leased: str
    items: str
    known: str
    ended: str
    held: str
    leases: str
    rewound: str

    def __init__(self, run: str) -> None:
        if not run or len(run) > 200:
            raise ValueError(f"run name {run[:40]!r} can't name keys; use 1 to 200 characters")
        self.run = run
        # Braces in a name must not end the hash tag.
        self.channels = f"{PREFIX}:{{{quote(run, safe=' ')}}}:"
        self.all = [self.channels + name for name in NAMES]
        self.__dict__.update(zip(NAMES, self.all, strict=True))
