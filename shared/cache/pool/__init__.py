"""The host side of KV caches: which blocks each request holds."""
