"""The HTTP server: OpenAI's API over an engine, with streaming and bounded queues. Introduced in phase 4.

`app` assembles the application and `process` runs it; a request passes `http`, `routes` with their `bodies`, `answers`
and `engine`, which runs on a thread or in a process of its own.
"""
