"""Checks that two models have the same vocabulary, so that one may draft for the other. Introduced in phase 11."""

from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM
from shared.text.tokenizer import Tokenizer


def check_vocabulary(name: str, draft: tuple[CausalLM, Tokenizer], target: tuple[CausalLM, Tokenizer]) -> None:
    """Raise ConfigError with the first token in which the draft model ``name`` differs from the target. Embeddings may
    be padded differently, as long as the draft model cannot sample an id that the target does not have.
    """
    (draft_model, drafts), (model, targets) = draft, target
    theirs, ours = ({n: token for token, n in t.backend.get_vocab(True).items()} for t in (drafts, targets))
    if theirs != ours:
        first = next(n for n in sorted(theirs.keys() | ours.keys()) if theirs.get(n) != ours.get(n))
        raise ConfigError(
            f"draft_model {name!r} has another vocabulary than the model: token {first} is {theirs.get(first)!r} there "
            f"and {ours.get(first)!r} here; choose a draft model of the same family and size of vocabulary."
        )
    num_theirs, num_ours = draft_model.config.vocab_size, model.config.vocab_size
    if num_theirs > num_ours:
        raise ConfigError(
            f"draft_model {name!r} has logits for {num_theirs} tokens and the model for {num_ours}; a draft model may "
            "not have more than its target."
        )
