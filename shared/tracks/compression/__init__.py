"""KV compression: which cached tokens each KV head keeps. Introduced in phase 9.2."""
