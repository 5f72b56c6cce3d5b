"""KV compression: which cached tokens each KV head keeps. Introduced in phase 09.2."""
