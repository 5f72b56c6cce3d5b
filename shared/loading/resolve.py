"""Resolves a model name or path to a folder. Introduced in phase 1a.

A folder is used directly, a known name is looked up in the project's cache, and any other ``owner/name`` comes from the
hub through ``huggingface_hub``, whose cache and offline mode (``HF_HUB_OFFLINE=1``) apply.
"""

from pathlib import Path

from shared.errors import ModelFolderError

# Weights, configuration and tokenizer; never a pickle.
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]


def resolve_model(name_or_path: str | Path) -> Path:
    """The folder of a model; raises ModelFolderError if there is none."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.exists():
        raise ModelFolderError(f"{name} is a file; give the folder that holds config.json and the weights.")

    from shared.checkpoints.demo import KNOWN_MODELS, local_model_folder

    if name in KNOWN_MODELS:
        folder = local_model_folder(name)
        if folder is None:
            raise ModelFolderError(f"{name} has not been fetched yet; run `infer model pull {name}` once.")
        return folder
    is_path = name.startswith((".", "/", "~")) or name.count("/") != 1 or not all(name.split("/"))
    if is_path:
        raise ModelFolderError(
            f"{name!r} is neither a folder nor a known model; give a model's folder, one of "
            f"{', '.join(KNOWN_MODELS)}, or a hub name of the form owner/name."
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=constants.HF_HUB_OFFLINE))
    except LocalEntryNotFoundError:
        reason = "the hub is unreachable and the cache does not contain the model"
    except HFValidationError as error:
        reason = str(error)
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise ModelFolderError(
        f"The model {name} could not be downloaded from the hub: {reason}. Check the name and the network, or pass the "
        "folder of a model on this machine."
    )
