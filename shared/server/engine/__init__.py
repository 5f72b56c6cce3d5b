"""The engine's side of the server: its loop, its thread or process, and the client of the loop."""
