"""The sampling settings that a checkpoint recommends in its ``generation_config.json``. Introduced in phase 4.

Invariant: the result holds valid fields of ``SamplingParams``, and only those in the file; as in vLLM, ``do_sample``
and lengths are ignored.
"""

import json
from pathlib import Path
from typing import Any

from shared.errors import ModelFolderError, RequestError
from shared.sampling.params import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The settings by name; none without the file. Raises ModelFolderError for an invalid setting."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {name: content[name] for name in NAMES if content.get(name) is not None}
        if found.get("top_k") == 0:  # no limit
            del found["top_k"]
        SamplingParams(**found)
    except (ValueError, AttributeError, RequestError) as error:
        raise ModelFolderError(
            f"{path} has no valid sampling settings ({error}); mend it, or serve with --no-generation-config."
        ) from None
    return found
