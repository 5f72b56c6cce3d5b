"""From a checked body to an answer: prompts, requests, and what becomes of their outputs."""
