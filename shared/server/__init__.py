"""The HTTP server: OpenAI's API over an engine, with streaming and bounded queues. Introduced in phase 4.

`engine_loop` owns the engine, on a thread (`engine_thread`) or in a process of its own (`engine_process`), and
`engine_client` is its counterpart on the event loop; `answer_stream` buffers one request's outputs for its client,
and `answer` joins the choices of one response; `protocol` and `fields` define the request bodies, `description` their
schema; `completions`, `chat` and `status` are the routes; `event_stream` and `sse` send
responses; `app` assembles the application and `process` runs it. The server uses only the engine protocol that every
phase from 4 on implements.
"""
