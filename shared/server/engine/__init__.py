"""The engine's side of the server: its loop, its thread or process, and their client."""
