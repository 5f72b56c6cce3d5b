"""The HTTP server around an engine: OpenAI's interface, streaming, bounded in every direction. Introduced in phase 4.

`engine_loop` owns the engine, on a thread (`engine_thread`) or in a process of its own (`engine_process`), and
`engine_client` is the event loop's side of it; `answer_stream` carries one request's outputs to its client; `protocol`
says what a request may hold; `completions`, `chat` and `status` are the routes; `event_stream` and `sse` send; `app`
puts them together and `process` runs them. The server needs of an engine only the protocol that phases from 4 on meet.
"""
