"""From a checked body to an answer: prompts, requests, and the handling of their outputs."""
