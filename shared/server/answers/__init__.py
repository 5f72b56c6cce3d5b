"""From a checked body to an answer: prompts, requests, and what is made of their outputs."""
