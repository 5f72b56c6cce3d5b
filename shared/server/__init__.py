"""The HTTP server: OpenAI's API over an engine, with streaming and bounded queues. Introduced in phase 4.

`app` assembles the application and `process` runs it; a request passes through `http`, `routes` with their `bodies`,
`answers` and `engine`, which runs on its own thread or in its own process.
"""
