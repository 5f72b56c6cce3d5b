"""Which replica a request goes to: the one that has its prefix, unless that replica is much busier. Follows phase 11.

The gateway has no tokenizer and needs none: prompts with a common text prefix have a common token prefix, except
perhaps for the prefix's last tokens. The text is divided into pieces, and the key of a piece hashes all text up to its
end: equal keys mean equal prefixes (as in SGLang's router, which keeps a tree of characters). Invariant: decisions
depend only on the arguments, so the simulator and the router make the same ones.
"""

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

CHUNK = 64
"""Bytes of a piece of text: about one block of the KV cache."""
MAX_CHUNKS = 512
MIN_SHARE = 0.5
"""The minimum share of a prompt's pieces that a replica must have. So a shared system prompt before a longer question
is no reason to send every request to one replica."""
SLACK = 4
"""How many more ongoing requests the replica with the prefix may have than the less busy of two others."""
MAX_KEYS = 2**18
"""Maximum keys of a gateway's table: enough for some thousand conversations. A large fleet needs more; see `infer
simulate --table-keys`."""
MOST_REPLICAS = 256
"""Maximum number of replicas recorded for a key. If there are too few, these get all requests with a popular beginning,
up to the slack: with 32, a thousand simulated replicas kept up with fewer requests than with two choices."""

Key = TypeVar("Key", bound=Hashable)
Replica = TypeVar("Replica")


def prefix_keys(body: bytes, session: str | None = None) -> tuple[bytes, ...]:
    """The keys of a request's prompt, one for each whole piece; none if the body is not a request with a prompt.

    A session, which the client names in a header, replaces the prompt by a single key. A ``cache_salt`` is part of
    every key, as it is in the prefix tree.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # the replica will refuse it
        return ()
    if not isinstance(request, dict):
        return ()
    salt = _digest(b"", json.dumps(request.get("cache_salt")).encode())
    if session is not None:
        return (_digest(salt, b"session " + session.encode()),)
    text = _prompt(request).encode(errors="surrogatepass")
    keys, parent = [], salt
    for start in range(0, min(len(text), MAX_CHUNKS * CHUNK) - CHUNK + 1, CHUNK):
        parent = _digest(parent, text[start : start + CHUNK])
        keys.append(parent)
    return tuple(keys)


def sample_two(replicas: Sequence[Replica], draw: random.Random) -> list[Replica]:
    """Two random replicas, in any order, or the only one. The others are not considered."""
    return draw.sample(replicas, min(2, len(replicas)))


def ranked(
    two: list[Replica],
    loads: Mapping[Replica, int],
    matches: Mapping[Replica, int],
    num_keys: int,
    *,
    min_share: float = MIN_SHARE,
    slack: int = SLACK,
) -> list[list[Replica]]:
    """Groups of replicas, best first; within a group the least busy one should be chosen.

    The less busy of two replicas is hardly worse than the least busy of all, and gateways do not all choose the same
    one (Mitzenmacher, "The power of two choices in randomized load balancing", 2001). The replica with the longest
    matching prefix precedes them, if it has at least ``min_share`` of the keys and at most ``slack`` ongoing requests
    more than the less busy of the two.

    Args:
        two: from :func:`sample_two`.
        loads: the number of ongoing requests of the two, and of each replica in ``matches`` that may be chosen.
        matches: how many keys of the request each replica has, from :meth:`PrefixTable.matches`.
    """
    # exercise 12.1x4: the replica that has the prefix comes first, unless it has too little of it or is much busier
    # hint: a replica that is in `matches` and not in `loads` is gone
    # hint: of several replicas with the same prefix, the less busy one
    known = [replica for replica in matches if replica in loads]
    if known:
        best = max(known, key=lambda replica: (matches[replica], -loads[replica]))
        if matches[best] >= min_share * num_keys and loads[best] <= min(loads[one] for one in two) + slack:
            return [[best], two]
    return [two]
    # end exercise


class PrefixTable(Generic[Key, Replica]):
    """Records which replicas were sent which keys; the least recently used keys are forgotten.

    It says where a prefix was computed, not whether the replica still has it: a replica never reports evictions. Only
    the last ``MOST_REPLICAS`` replicas of a key are recorded, so the table stays bounded even if all requests share a
    system prompt.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._replicas: OrderedDict[Key, dict[Replica, None]] = OrderedDict()  # latest replica last

    def __len__(self) -> int:
        return len(self._replicas)

    def matches(self, keys: Sequence[Key]) -> dict[Replica, int]:
        """The replicas that were sent the longest known prefix, with the number of its keys."""
        for num in range(len(keys), 0, -1):
            if found := self._replicas.get(keys[num - 1]):
                return dict.fromkeys(found, num)
        return {}

    def record(self, keys: Sequence[Key], replica: Replica) -> None:
        """Record that a request with these keys was sent to ``replica``."""
        for key in reversed(keys):  # the first key is the last to be forgotten
            known = self._replicas.setdefault(key, {})
            known.pop(replica, None)
            known[replica] = None
            if len(known) > MOST_REPLICAS:
                del known[next(iter(known))]
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_keys:
            self._replicas.popitem(last=False)

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget every replica that is not among ``replicas``."""
        for key in list(self._replicas):
            self._replicas[key] = {replica: None for replica in self._replicas[key] if replica in replicas}
            if not self._replicas[key]:
                del self._replicas[key]


def _prompt(request: dict[str, Any]) -> str:
    """The prompt as text: unchanged, or as JSON if it is a list of messages or token ids."""
    prompt = request.get("messages", request.get("prompt", ""))
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def _digest(parent: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, key=parent[:64], digest_size=16).digest()
